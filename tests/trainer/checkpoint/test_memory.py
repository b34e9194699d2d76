"""How much host memory there is for copies of checkpoints, as the kernel says it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trainer.checkpoint.staging import MemoryNeed, available_memory, shortage

GIB = 1 << 30


def test_ranks_of_one_host_share_its_memory() -> None:
    one, other = MemoryNeed("n1", 4 * GIB, 10 * GIB), MemoryNeed("n2", 4 * GIB, 10 * GIB)
    assert shortage([one, one, other, other]) is None
    assert (
        shortage([one, one, one, other])
        == "n1 would need 12.0 GiB of memory for copies and can spare 8.0 GiB"
    )
    assert shortage([one, MemoryNeed("n1", GIB, 5 * GIB)]) is not None, (
        "the least that any rank saw counts"
    )
    assert shortage([MemoryNeed("n1", 0, 0)]) is None, (
        "nothing more is needed where the memory is held already"
    )


def machine(root: Path, group: str) -> tuple[Path, Path]:
    """A node with 10 GiB free; its cgroups are still to be made."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal:  99 kB\nMemAvailable:  {10 * GIB >> 10} kB\nHugePages_Total: 0\n"
    )
    (proc / "self" / "cgroup").write_text(f"{group}\n")
    cgroups.mkdir()
    return proc, cgroups


def limit(place: Path, most: str, current: int, cached: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{most}\n")
    (place / "memory.current").write_text(f"{current}\n")
    (place / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file {cached}\n")


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/slurm/job_7/step_0")
    assert available_memory(proc, cgroups) == 10 * GIB
    limit(cgroups / "slurm" / "job_7", str(6 * GIB), 5 * GIB, GIB // 2)
    limit(cgroups / "slurm" / "job_7" / "step_0", "max", 5 * GIB, 0)
    assert available_memory(proc, cgroups) == 2 * GIB
    limit(cgroups / "slurm", str(5 * GIB), 6 * GIB, 0)
    assert available_memory(proc, cgroups) == 0


def test_a_node_without_unified_cgroups(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "4:memory:/slurm")
    assert available_memory(proc, cgroups) == 10 * GIB


def test_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        available_memory(tmp_path, tmp_path)
