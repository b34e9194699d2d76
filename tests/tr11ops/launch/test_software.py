"""Which code and versions an attempt runs: commit, branch, what is not committed, and what is not
known.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tr11ops.launch import software
from tr11ops.launch.software import identify_code, look_at_code, software_versions
from tr11ops.rundir.attempts import PATCH_FILE, CodeIdentity, code_of, version_words, versions_of

TOKEN = "hf_" + "aB3" * 12


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package `trainer` in a checkout with one commit on branch `work`."""
    top = tmp_path / "code"
    folder = top / "trainer"
    folder.mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "work", str(top))
    (folder / "__init__.py").write_text("")
    (folder / "loop.py").write_text("rate = 1\n")
    (top / ".gitignore").write_text("*.log\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "first")
    return folder


def test_a_clean_checkout_is_its_commit(package: Path) -> None:
    (package / "big.log").write_text("ignored")
    found, changes = look_at_code(package)
    commit = git(package, "rev-parse", "HEAD")
    assert found == CodeIdentity(str(package.parent), commit, "work") and changes == b""
    assert str(found) == f"work {commit[:10]}"
    git(package, "checkout", "-q", "--detach")
    assert str(look_at_code(package)[0]) == commit[:10]


def test_what_is_not_committed_is_kept_and_can_be_applied(package: Path, tmp_path: Path) -> None:
    (package / "loop.py").write_text("rate = 2\n")
    (package / "new.py").write_text("x = 1\nlast = 2")
    (package / "data.bin").write_bytes(bytes(100))
    found, changes = look_at_code(package)
    assert (found.changed_count, found.patch, found.is_cut) == (3, PATCH_FILE, False)
    assert set(found.changed) == {"trainer/loop.py", "trainer/new.py", "trainer/data.bin"}
    assert (
        b"+rate = 2" in changes and b"(not kept: 100 bytes)" in changes and bytes(10) not in changes
    )
    git(tmp_path, "clone", "-q", str(package.parent), str(tmp_path / "again"))
    whole = changes.replace(
        b"diff --git a/trainer/data.bin b/trainer/data.bin\nnew file mode 100644\n", b""
    )
    (tmp_path / "patch").write_bytes(whole.replace(b"(not kept: 100 bytes)\n", b""))
    git(tmp_path / "again", "apply", str(tmp_path / "patch"))
    assert (tmp_path / "again/trainer/loop.py").read_text() == "rate = 2\n"
    assert (tmp_path / "again/trainer/new.py").read_text() == "x = 1\nlast = 2"
    (package / "loop.py").write_text("rate = 3\n")
    other, _ = look_at_code(package)
    assert (
        other.commit == found.commit and other.digest != found.digest and str(other) != str(found)
    )


def test_secrets_do_not_reach_the_run_directory_and_the_size_is_limited(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "Q" * 60 + "\n-----END PRIVATE KEY-----\n"
    (package / "loop.py").write_text(f'token = "{TOKEN}"\nrate = 2\n{key}')
    _, changes = look_at_code(package)
    assert TOKEN.encode() not in changes and b"+rate = 2" in changes and b"QQQQ" not in changes
    monkeypatch.setattr(software, "PATCH_BYTES", 1000)
    (package / "loop.py").write_text("".join(f"line = {number}\n" for number in range(1000)))
    found, changes = look_at_code(package)
    assert found.is_cut and 900 < len(changes) <= 1000 and changes.endswith(b"\n")
    monkeypatch.setattr(software, "READ_BYTES", 2000)
    found, changes = look_at_code(package)
    assert found.is_cut and len(changes) <= 1000


def test_a_package_that_no_checkout_tracks_has_no_commit(package: Path, tmp_path: Path) -> None:
    """Also in an environment that lies inside of another project's checkout, where it is ignored."""
    (package.parent / ".gitignore").write_text("venv\n")
    for folder in (
        package.parent / "venv/site-packages/trainer",
        tmp_path / "elsewhere" / "trainer",
    ):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        found, changes = look_at_code(folder)
        assert (found.commit, changes) == (
            "",
            b"",
        ) or found.why == ""  # installed from a commit, here
        assert found.folder == str(folder) and "work" not in str(found)


def test_what_cannot_be_asked_is_not_known(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "code_folder", lambda: package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        str(identify_code(tmp_path / "attempt"))
        == "not known: git is not installed on this machine"
    )
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(software, "GIT_SECONDS", 0.2)
    assert str(identify_code(tmp_path / "attempt")) == "not known: git did not answer within 0.2 s"
    assert not (tmp_path / "attempt").exists()


def test_an_attempt_keeps_the_changes_beside_its_record(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "code_folder", lambda: package)
    (package / "loop.py").write_text("rate = 2\n")
    assert identify_code(tmp_path / "attempt").patch == PATCH_FILE
    assert "+rate = 2" in (tmp_path / "attempt" / PATCH_FILE).read_text()
    git(package, "checkout", "-q", ".")
    assert identify_code(tmp_path / "attempt").changed_count == 0  # requeued under the same number
    assert not (tmp_path / "attempt" / PATCH_FILE).exists()


def test_nothing_is_invented_of_cuda_nccl_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "DRIVER_FILES", (tmp_path / "none", tmp_path / "version"))
    for text, cuda, nccl in (("cuda: Optional[str] = None", "none", "none"), ("cuda = '77.1'", "77.1", "unknown"),
                             ("nothing = 1", "unknown", "unknown")):  # fmt: skip
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch/__init__.py").write_text("raise ImportError('it is not to be imported')")
        (tmp_path / "torch/version.py").write_text(f"__version__ = '1'\n{text}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        found = software_versions()
        assert (found["cuda"], found["nccl"], found["driver"]) == (cuda, nccl, "none")
    (tmp_path / "version").write_text("550.54.15\n")
    assert software_versions()["driver"] == "550.54.15"


def test_records_are_read_whoever_wrote_them() -> None:
    assert code_of({}) is None and code_of({"code": {"commit": 5}}) is None
    assert code_of({"code": {"commit": "a" * 40, "changed": ["x"], "more": 1}}) == CodeIdentity(
        "", "a" * 40, "", ("x",)
    )
    assert versions_of({"python": "3.11", "versions": {"torch": "2"}}) == {
        "torch": "2",
        "python": "3.11",
    }
    assert versions_of({"versions": []}) == {}
    assert version_words({"torch": "2", "cuda": "none", "driver": "550"}) == "torch 2, driver 550"


def test_an_image_without_git_knows_the_commit_that_it_was_installed_from(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "tr11-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tr11\nVersion: 1\n")
    told = {
        "url": "https://x/tr11",
        "vcs_info": {"vcs": "git", "commit_id": "c" * 40, "requested_revision": "v1"},
    }
    (folder / "direct_url.json").write_text(json.dumps(told))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(software, "code_folder", lambda: package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(identify_code(tmp_path / "attempt")) == "v1 cccccccccc"
