"""A backup with verification: tr11 against `rclone copy` + `rclone check --download`, and `cp -r` +
`sha256sum`.

    python benchmarks/backup.py [--gigabytes 2] [--files 64] [--small 2000] [--repeat 3] [--folder DIR] [--json]

A checkpoint of large files, with many small ones beside, is copied to another folder of the same
file system. Every tool copies all of it and then reads every byte of the copy to compare it; the
orders alternate, and before each turn the file system's cache of the source is dropped. tr11 also
flushes the copy to the disk and reads it back from there; the others read back what is still in
memory, unless they are told to flush and drop it first (the rows "from disk").
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from tr11ops.backup.base import Archive
from tr11ops.backup.copying import Format, copy_source
from tr11ops.backup.folder import FolderArchive, Owner
from tr11ops.backup.source import read_source
from tr11ops.backup.transfer import Transfer
from tr11ops.rundir.copies import location_of
from trainer.contract.manifest import FileEntry, Manifest, file_digest

BUDGET = 0.9  # of rclone's speed
STEP = 1000
PARALLEL = 8

Place = TypeVar("Place")
Tool = Callable[[Path, Path], None]  # where to, what


def make_source(folder: Path, gigabytes: float, files: int, small: int) -> int:
    """A checkpoint of random bytes below `folder`; returns its bytes."""
    place = folder / f"global_step{STEP}"
    chance, entries = random.Random(0), []
    sizes = {
        f"weights/__{number}_0.distcp": int(gigabytes * 1e9 / files) for number in range(files)
    }
    sizes |= {
        f"optimizer/{number:05d}.pt": chance.randrange(200, 20_000) for number in range(small)
    }
    block = os.urandom(8 << 20)
    for path, size in sizes.items():
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            for begin in range(0, size, len(block)):
                shift = chance.randrange(len(block))
                stream.write((block[shift:] + block[:shift])[: size - begin])
        entries.append(FileEntry(path, size, file_digest(target)))
    Manifest(
        step=STEP, consumed_samples=0, consumed_tokens=0, files=tuple(entries), topology={}, model={}, run_card_hash="",
        created=time.time(),
    ).write(place)  # fmt: skip
    return sum(sizes.values())


def forget(folder: Path) -> None:
    """Flush a folder to the disk and drop the system's cache of it, so that it is read from the
    disk next.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# ----------------------------------------------------------------------------- the tools
def tr11(target: Path, source: Path, format: str = "files") -> None:
    run([sys.executable, __file__, "--one", format, str(source), str(target)])


def tr11_tar(target: Path, source: Path) -> None:
    tr11(target, source, "tar")


def rclone(target: Path, source: Path, is_from_disk: bool = False) -> None:
    speed = [
        "--transfers",
        str(PARALLEL),
        "--checkers",
        str(PARALLEL),
        "--config",
        "/dev/null",
        "-q",
    ]
    run(["rclone", "copy", *speed, str(source), str(target)])
    if is_from_disk:
        forget(target)
    run(["rclone", "check", "--download", *speed, str(source), str(target)])


def rclone_from_disk(target: Path, source: Path) -> None:
    rclone(target, source, is_from_disk=True)


def cp(target: Path, source: Path, is_from_disk: bool = False) -> None:
    run(["cp", "-r", str(source), str(target)])
    if is_from_disk:
        forget(target)
    sums = "cd '{}' && find . -type f -print0 | sort -z | xargs -0 -n 16 -P 2 sha256sum | sort"
    one, two = (run(["sh", "-c", sums.format(folder)]) for folder in (source, target / source.name))
    assert one == two


def cp_from_disk(target: Path, source: Path) -> None:
    cp(target, source, is_from_disk=True)


def run(command: list[str]) -> str:
    """What a command printed. Leaves with what it complained of."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def copy_once(archive: Archive, source: Path, format: Format = "files") -> None:
    """What the child process does: one copy, as `tr11 backup run` makes it."""
    copy_source(
        archive, read_source(source, STEP, "full"), "full", location_of("full", "main", STEP), run="benchmark",
        variant="main", transfer=Transfer(parallel=PARALLEL), format=format,
    )  # fmt: skip


@contextmanager
def empty_folder(place: Path) -> Iterator[Path]:
    """A new folder for one turn."""
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place)
        os.sync()


# --------------------------------------------------------------------- what both measurements share
def measure(
    source: Path,
    place: Callable[[], AbstractContextManager[Place]],
    tools: Mapping[str, Callable[[Place, Path], None]],
    repeat: int,
) -> dict[str, list[float]]:
    """Wall seconds of each tool in each round, each turn to a new `place`; every round begins with
    another tool.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tools}
    order = list(tools)
    for number in range(repeat):
        for name in [*order[number % len(order) :], *order[: number % len(order)]]:
            forget(source)
            with place() as target:
                begin = time.perf_counter()
                tools[name](target, source)
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def options(
    description: str | None, gigabytes: float, files: int, small: int
) -> argparse.ArgumentParser:
    """The options of both, with their defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, default=gigabytes, help="of all large files together"
    )
    parser.add_argument("--files", type=int, default=files, help="large ones")
    parser.add_argument("--small", type=int, default=small, help="files of 0.2 to 20 kB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint lies; default: a temporary folder"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def tell(what: str, size: int, seconds: Mapping[str, list[float]], as_json: bool) -> None:
    """Print medians, and how many times as fast as each tool tr11 is."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: value / medians["tr11"] for name, value in medians.items()}
    within = ratios.get("rclone", BUDGET) >= BUDGET
    if as_json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "bytes": size,
                    "seconds": seconds,
                    "ratios": ratios,
                    "within_budget": within,
                }
            )
        )
        return
    print(f"{size / 1e9:.2f} GB in {what}; {len(os.sched_getaffinity(0))} cores")
    for name, value in medians.items():
        print(
            f"  {name:<26} median {value:6.2f} s, best {min(seconds[name]):6.2f} s, {size / value / 1e6:5.0f} MB/s, "
            f"tr11 is {ratios[name]:.2f}x as fast"
        )
    print(f"  budget: at least {BUDGET:g}x rclone: {'kept' if within else 'MISSED'}")


def main() -> None:
    parser = options(__doc__, gigabytes=2.0, files=64, small=2000)
    parser.add_argument(
        "--one", nargs=3, metavar=("FORMAT", "SOURCE", "TARGET"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.one:
        format, source, target = arguments.one
        archive = FolderArchive(Path(target), "store", Owner("benchmark"))
        copy_once(archive, Path(source), "tar" if format == "tar" else "files")
        return
    tools: dict[str, Tool] = {"tr11": tr11, "tr11, one tar": tr11_tar}
    if shutil.which("rclone"):
        tools |= {"rclone": rclone, "rclone, from disk": rclone_from_disk}
    tools |= {"cp + sha256sum": cp, "cp + sha256sum, from disk": cp_from_disk}
    with tempfile.TemporaryDirectory(prefix="tr11-backup-", dir=arguments.folder) as name:
        folder = Path(name)
        size = make_source(folder, arguments.gigabytes, arguments.files, arguments.small)
        source = folder / f"global_step{STEP}"
        seconds = measure(source, lambda: empty_folder(folder / "copy"), tools, arguments.repeat)
    tell(
        f"{arguments.files} large and {arguments.small} small files, to a folder",
        size,
        seconds,
        arguments.json,
    )


if __name__ == "__main__":
    main()
