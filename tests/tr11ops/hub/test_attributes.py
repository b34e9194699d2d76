"""Rules of .gitattributes, against git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tr11ops.hub.sync_plan import RULE, is_lfs, parse, pattern_of, with_rules
from tr11ops.twin.hub.state import DEFAULT_ATTRIBUTES

PATTERNS = [
    "*.txt", "**.txt", "*.bin", "*tfevents*", "logs/*.txt", "/logs/main/*", "logs/**", "**/main/*.txt", "logs/**/a.txt", "a?txt",
    "[ab].txt", "[!a].txt", "*.[tx]xt", '"with space.txt"', "with[[:space:]]space.txt", r"a\*.txt", "*", "main", "a.txt",
]  # fmt: skip
SETTINGS = [
    "filter=lfs diff=lfs merge=lfs -text",
    "-filter",
    "!filter",
    "filter=other",
    "text",
    "filter",
    "filter=lfs",
]
PATHS = [
    "a.txt", "b.txt", "logs/a.txt", "logs/main/a.txt", "logs/main/deep/b.txt", "main/a.txt", "with space.txt", "x.bin",
    "a*.txt", "tensorboard/main/events.out.tfevents.1", "logs/main/noname", "logs/main/s p a c e",
]  # fmt: skip


@pytest.fixture(scope="module")
def git(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("git")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)

    def asked(text: str, paths: list[str]) -> list[bool]:
        (folder / ".gitattributes").write_text(text)
        found = subprocess.run(
            ["git", "-C", str(folder), "check-attr", "-z", "filter", "--stdin"],
            input="\0".join(paths) + "\0", capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [value == "lfs" for value in found.stdout.split("\0")[2::3]]

    return asked


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(SETTINGS)), max_size=5))
def test_git_judges_alike(git, lines):
    text = "# a comment\n\n" + "".join(f"{pattern} {setting}\n" for pattern, setting in lines)
    rules = parse(text)
    assert [is_lfs(path, rules) for path in PATHS] == git(text, PATHS)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(SETTINGS)), max_size=4),
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=4),
)
def test_after_repair_every_path_is_large_and_nothing_is_lost(git, lines, paths):
    text = "\n".join(f"{pattern} {setting}" for pattern, setting in lines)
    after = with_rules(text, paths)
    assert after.startswith(text) and all(git(after, paths)) and with_rules(after, paths) == after


def test_nothing_is_added_where_the_rules_are_there():
    events = ["tensorboard/main/events.out.tfevents.1.host"]
    assert with_rules(DEFAULT_ATTRIBUTES, events) == DEFAULT_ATTRIBUTES
    assert (
        with_rules(DEFAULT_ATTRIBUTES, [*events, "logs/main/a.txt", "logs/b.txt"])
        == DEFAULT_ATTRIBUTES + f"*.txt {RULE}\n"
    )


def test_a_name_without_an_ending_gets_a_rule_of_its_own():
    assert pattern_of("logs/main/s p.a c") == "/logs/main/s?p.a?c"
    assert pattern_of("events.out.tfevents.1.host.txt") == "*tfevents*"
