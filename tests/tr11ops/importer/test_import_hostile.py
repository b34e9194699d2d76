"""Files that are no scripts, damaged scripts, and what the writer makes of odd values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tr11ops.importer.old_scripts import NAMES, SCRIPTS, minimal
from tr11ops.base.errors import ScriptError
from tr11ops.importer.importing import import_script, import_text, read_script
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES
from tr11ops.runcard.toml_writer import toml_value, write_card
from trainer.config.card import CardError


# ----------------------------------------------------------------------------- hostile files
def test_files_that_are_no_scripts(tmp_path: Path) -> None:
    contents = {
        "binary": (b"#!/bin/bash\n\0\1\2", "line 2: it is not text"),
        "latin": (b"#!/bin/bash\n# \xe9\n", "line 2: it is not UTF-8 text"),
        "huge": (b"#\n" * (LARGEST_SCRIPT_BYTES // 2 + 1), "it is larger than"),
        "empty": (b"", "no command in it starts a training"),
        "train": (b"source real.slurm\n", "line 1 sources real.slurm"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ScriptError) as caught:
            import_script(tmp_path / name)
        assert words in str(caught.value)
    with pytest.raises(ScriptError, match="folder"):
        read_script(tmp_path)
    with pytest.raises(ScriptError, match="does not exist"):
        read_script(tmp_path / "no")


@pytest.mark.parametrize(
    ("settings_text", "words"),
    [
        ("{", "are not JSON"),
        ("[1]", "are no JSON object"),
        ('{"a":' * 9000 + "1" + "}" * 9000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "huge number"),
        ("{" + ",".join(f'"k{i}": 1' for i in range(1500)) + "}", "more than 1000 keys"),
    ],
)
def test_deepspeed_settings_that_are_none(settings_text: str, words: str) -> None:
    text = minimal(
        "--deepspeed --deepspeed_config d.json", before=f"cat <<'E' > d.json\n{settings_text}\nE"
    )
    with pytest.raises(ScriptError) as caught:
        import_text(text, "x")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_deepspeed_settings_with_unknown_parts() -> None:
    before = (
        'cat <<E > d.json\n{"train_batch_size": $N, "gradient_clipping": 1.0, "name": "$WHO"}\nE'
    )
    found = import_text(
        minimal("--deepspeed --deepspeed_config d.json --clip-grad 1.0", before=before), "x"
    )
    assert [item.option for item in found.decisions] == ["DeepSpeed name"]


def test_an_override_that_is_none_is_refused() -> None:
    with pytest.raises(CardError, match="is not a known key"):
        import_text(minimal(), "x", ["model.layerss=3"])


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.sampled_from(NAMES), st.data())
def test_damaged_scripts_are_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    text = (SCRIPTS / f"{name}.slurm").read_text()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 300))
    put = data.draw(st.text("$\"'`{}()\\\n#=- ab1\x1b\x7fé", max_size=12))
    damaged = text[:start] + put + text[start + length :]
    try:
        found = import_text(damaged, name)
    except ScriptError as error:
        assert "\n" not in str(error)
    else:
        assert tomllib.loads(found.text) == found.tables


# ----------------------------------------------------------------------------- the writer
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=4)), max_size=5),
    st.text(max_size=20),
)
def test_what_is_written_is_read_back(table: dict[str, Any], remark: str) -> None:
    tables = {"slurm": {"nodes": 1, "environment": table}, "batch": {"ramp": table}}
    remarks = {f"slurm.environment.{key}": remark for key in table} | {
        "slurm.nodes": remark,
        "batch.ramp": remark,
    }
    assert tomllib.loads(write_card(tables, remarks, [remark])) == tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (220_000_000, "220_000_000"),
        (2048, "2048"),
        (6e-5, "6e-5"),
        (1e-8, "1e-8"),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (1e300, "1e300"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert toml_value(value) == text
