"""Each source of quotas: its recorded output as figures, and what is no output at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tr11ops.base.errors import SourceError
from tr11ops.base.processes import ProbeOutput
from tr11ops.filesystems.sources import SOURCES
from tr11ops.runcard.watching import FilesystemSection

DATA = Path(__file__).parents[2] / "data" / "filesystems"


def output(name: str, status: int = 0, error: str = "") -> ProbeOutput:
    return ProbeOutput(status, (DATA / name).read_text(), error)


def test_idrquota_tells_two_shares() -> None:
    reading = SOURCES["idrquota"].parse([output("idrquota.txt")])
    assert (reading.bytes_share, reading.inodes_share) == (0.862, 0.687)
    assert reading.report.startswith("WORK    space")


@pytest.mark.parametrize(
    "text", ["WORK (86.2%)", "a (1.0%) b (2.0%) c (3.0%)", "", "no figure", "(86.2%)(68.7%)"]
)
def test_idrquota_with_other_than_two_figures_is_unknown(text: str) -> None:
    with pytest.raises(SourceError):
        SOURCES["idrquota"].parse([ProbeOutput(0, text)])


def test_lfs_of_a_group() -> None:
    reading = SOURCES["lfs"].parse([output("lfs-group.txt")])
    assert (reading.bytes_used, reading.bytes_limit) == (943718400 * 1024, 1048576000 * 1024)
    assert (reading.inodes_used, reading.inodes_limit) == (250000, 500000)
    assert reading.notes == ()


def test_lfs_over_its_quota_with_units_and_a_long_name() -> None:
    reading = SOURCES["lfs"].parse([output("lfs-over.txt")])
    assert (reading.bytes_used, reading.bytes_limit) == (1.1 * 2**40, 2**40)
    assert (reading.inodes_used, reading.inodes_limit) == (510000, 500000)
    assert [note.split(": ")[1] for note in reading.notes] == [
        "over its quota of bytes, time of grace 6d23h59m", "over its quota of files, no time of grace is left",
    ]  # fmt: skip


def test_lfs_without_a_limit_and_with_a_silent_server() -> None:
    reading = SOURCES["lfs"].parse([output("lfs-none.txt")])
    assert (reading.bytes_used, reading.bytes_limit, reading.inodes_limit) == (
        512 * 1024,
        None,
        None,
    )
    with pytest.raises(SourceError, match="not complete"):
        SOURCES["lfs"].parse([output("lfs-silent.txt")])


def test_quota_gives_the_fullest_and_its_status_is_no_failure() -> None:
    reading = SOURCES["quota"].parse([output("quota-w.txt", status=1)])
    assert (reading.bytes_used, reading.bytes_limit) == (900000 * 1024, 800000 * 1024)
    assert reading.notes == ("/dev/mapper/vg-work: over its quota of bytes, time of grace 6days",)


def test_quota_in_units() -> None:
    reading = SOURCES["quota"].parse([output("quota-s.txt")])
    assert (reading.bytes_used, reading.bytes_limit) == (17167 * 2**20, 19532 * 2**20)
    assert (reading.inodes_used, reading.inodes_limit) == (40000, 35000)


@pytest.mark.parametrize(
    "found",
    [output("quota-none.txt"), ProbeOutput(1, "", "quota: no such user"), ProbeOutput(0, "")],
)
def test_quota_without_a_row_is_unknown(found: ProbeOutput) -> None:
    with pytest.raises(SourceError):
        SOURCES["quota"].parse([found])


def test_df_counts_what_can_still_be_written() -> None:
    reading = SOURCES["df"].parse([output("df-k.txt"), output("df-i.txt")])
    assert reading.bytes_used is not None and reading.bytes_free is not None
    assert reading.bytes_limit == reading.bytes_used + reading.bytes_free
    assert reading.inodes_limit == 16777216
    shared = SOURCES["df"].parse([output("df-shared.txt"), output("df-no-inodes.txt")])
    assert shared.bytes_free == 85899348 * 1024
    assert (shared.inodes_used, shared.inodes_limit) == (None, None)


def test_df_agrees_with_the_kernel(tmp_path: Path) -> None:
    """Not what we parsed from someone's text, but what the C library says of the same disk."""
    import subprocess

    section = FilesystemSection(name="x", source="df", path=str(tmp_path))
    outputs = [
        ProbeOutput(0, subprocess.check_output(command, text=True))
        for command in SOURCES["df"].commands(section)
    ]
    usage = shutil.disk_usage(tmp_path)
    reading = SOURCES["df"].parse(outputs)
    assert reading.bytes_free == pytest.approx(
        usage.free, rel=0.05
    ) and reading.bytes_used == pytest.approx(usage.used, rel=0.05)


def test_du_tolerates_closed_folders_and_says_so() -> None:
    error = (DATA / "du-errors.txt").read_text()
    reading = SOURCES["du"].parse([output("du-bytes.txt", 1, error), output("du-inodes.txt")])
    assert (reading.bytes_used, reading.inodes_used) == (400 * 2**30, 2900000)
    assert "more than it says" in reading.notes[0]
    assert SOURCES["du"].parse([output("du-bytes.txt")]).notes == ()
    with pytest.raises(SourceError, match="Permission denied"):
        SOURCES["du"].parse([ProbeOutput(1, "", error)])


def test_du_counts_inodes_only_against_a_limit() -> None:
    section = FilesystemSection(name="x", source="du", path="/x")
    assert len(SOURCES["du"].commands(section)) == 1
    assert [command[1:3] for command in SOURCES["du"].commands(section.model_copy(update={"inodes_limit": 5}))] == [
        ("-bs", "--"), ("-s", "--inodes"),
    ]  # fmt: skip


def test_what_needs_a_path_says_so() -> None:
    for source in ("lfs", "df", "du"):
        section = FilesystemSection.model_validate({"name": "x", "source": source})
        with pytest.raises(SourceError, match="needs a path"):
            SOURCES[source].commands(section)


@given(
    st.sampled_from(sorted(SOURCES)),
    st.lists(
        st.text(alphabet="0123456789-*[]%() /\nkKMGT.Filesystem", max_size=80),
        min_size=2,
        max_size=2,
    ),
)
def test_no_output_is_worse_than_unknown(name: str, texts: Sequence[str]) -> None:
    try:
        reading = SOURCES[name].parse([ProbeOutput(0, text) for text in texts])
    except SourceError as error:
        assert "\n" not in str(error)
    else:
        figures = (reading.bytes_used, reading.bytes_share, reading.inodes_used)
        assert any(figure is not None for figure in figures)
