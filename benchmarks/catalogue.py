"""`tr11 checkpoints list` and the plan of a prune with many checkpoints: seconds, processor time,
memory.

    python benchmarks/catalogue.py [--checkpoints 500] [--files 720] [--repeat 5] [--json]

Writes that many checkpoints of empty files (the catalogue looks at sizes, not at bytes), each with
a copy on record and a reading on record. Beside it, what every such list must do at least: `find
-type f -size` over the same files, and a scan of the folders alone in Python.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import to_builtins

from tr11ops.checkpoints.catalogue import Clocks, read_catalogue
from tr11ops.checkpoints.retention import RetentionPolicy, decide
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_digests import DigestRecord, write_digest
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.rundir.copies import CopyRecord, identity_of, write_copy
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.manifest import FileEntry, Manifest
from trainer.contract.paths import RunPaths

FOLDERS = ("weights", "optimizer", "rng")
TOPOLOGY = {"tensor": 4, "pipeline": 12, "data": 8}


def write_checkpoint(folder: Path, step: int, files: int) -> None:
    """One checkpoint of empty files, with the manifest that the trainer would write, but not
    flushed to disk.
    """
    place = folder / checkpoint_name(step)
    for name in FOLDERS:
        (place / name).mkdir(parents=True)
    entries = []
    for number in range(files):
        path = f"{FOLDERS[number % 3]}/rank_{number:05d}_model_states.distcp"
        os.close(os.open(place / path, os.O_CREAT | os.O_WRONLY, 0o664))
        entries.append(FileEntry(path, 0, f"{step * number:064x}"))
    manifest = Manifest(
        step, 2048 * step, 2048**2 * step, tuple(entries), TOPOLOGY, {}, "hash", 1.0
    )
    (place / "manifest.json").write_text(json.dumps(to_builtins(manifest), indent=1))


def write_run(directory: RunDirectory, count: int, files: int) -> None:
    """The whole run: checkpoints, `latest`, a copy and a reading of each on record."""
    folder = directory.paths.checkpoints
    for step in range(100, 100 * count + 1, 100):
        write_checkpoint(folder, step, files)
        identity = identity_of(folder / checkpoint_name(step))
        location = f"checkpoints/main/{checkpoint_name(step)}"
        write_copy(
            directory,
            CopyRecord(
                "store", "/archive", step, "full", identity, location, "files", files, 0, 1, 1
            ),
        )
        write_digest(directory, DigestRecord(step, identity, 1.0, files, 0))
    (folder / "latest").write_text(checkpoint_name(100 * count))


def cost(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, of the quickest repetition; a first one warms the
    cache.
    """
    work()
    found = []
    for _ in range(repeat):
        began, worked = time.perf_counter(), sum(os.times()[:4])
        work()
        found.append((time.perf_counter() - began, sum(os.times()[:4]) - worked))
    return min(found)


def scan_alone(folder: Path) -> None:
    """Every file's size and nothing else, in one thread."""
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    entry.stat()


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=500)
    parser.add_argument("--files", type=int, default=720)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr11-catalogue-") as place:
        directory = RunDirectory(
            RunPaths(Path(place), "bench", "main"), Path(place) / "kill-switch"
        )
        write_run(directory, options.checkpoints, options.files)
        folder, clocks = directory.paths.checkpoints, Clocks(time.time())
        policy = RetentionPolicy(
            15,
            10,
            100 * options.checkpoints,
            BackupSection(store="/archive"),
            {"store": "/archive"},
        )
        find = ["find", str(folder), "-type", "f", "-size", "+1"]
        works: dict[str, Callable[[], object]] = {
            "find -size": lambda: subprocess.run(find, check=True, stdout=subprocess.DEVNULL),
            "scan of sizes alone": lambda: scan_alone(folder),
            "rows (manifests and sizes)": lambda: list_rows(folder, None),
            "catalogue": lambda: read_catalogue(directory, clocks),
            "catalogue and decisions": lambda: decide(
                read_catalogue(directory, clocks), policy, clocks
            ),
        }
        costs = {name: cost(work, options.repeat) for name, work in works.items()}
    files = options.checkpoints * options.files
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.json:
        named = {
            name: {"seconds": seconds, "cpu_seconds": cpu} for name, (seconds, cpu) in costs.items()
        }
        print(json.dumps({"files": files, "costs": named, "peak_mib": peak}))
        return
    print(
        f"{options.checkpoints} checkpoints x {options.files} files; best of {options.repeat}; warm"
    )
    least = costs["scan of sizes alone"][1]
    for name, (seconds, cpu) in costs.items():
        print(
            f"  {name:28} {seconds:6.2f} s  CPU {cpu:5.2f} s, {1e6 * cpu / files:4.1f} us a file, {cpu / least:3.1f}x"
        )
    print(f"  peak memory {peak:.0f} MiB (Python {sys.version.split()[0]})")


if __name__ == "__main__":
    main()
