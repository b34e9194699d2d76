"""A log that grows, mirrored to a hub: seconds, processor seconds and bytes of each round, beside
`upload_folder`.

    python benchmarks/sync.py [--megabytes N] [--grow N] [--json]

The hub is the one of the tests, on this machine. Each way has its own repository and the same log:
a first round, two after the log has grown, one after which nothing was new. `once` starts a process
for each round, as cron does (its start is not counted), `every` stays one process. Each to a hub
with plain large objects, and to one with chunked (Xet) storage, where the bytes are those by which
the storage grew. `upload_folder` is what the library does by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import to_builtins

from trainer.contract.record import Record

ROOT = Path(__file__).parents[1]
LOG = "logs/main/main_log.txt"
LINES = 2000  # of a megabyte
ROUNDS = ("first", "grown", "grown again", "nothing new")


class Way(Record):
    """How it is mirrored: by what, in one process or in one for each round, and to what kind of
    storage.
    """

    name: str
    tool: str
    is_one_process: bool
    is_chunked: bool


WAYS = (
    Way("upload_folder", "upload_folder", False, False),
    Way("tr11 sync --once", "sync", False, False),
    Way("tr11 sync --every", "sync", True, False),
    Way("upload_folder, chunks", "upload_folder", False, True),
    Way("tr11 sync --once, chunks", "sync", False, True),
    Way("tr11 sync --every, chunks", "sync", True, True),
)


class Figure(Record):
    """One round: wall and processor seconds of the mirroring process, and bytes that reached the
    storage.
    """

    way: str
    round: str
    seconds: float
    processor_seconds: float
    bytes: int


# ------------------------------------------------------------------------- the process that mirrors
def work(tool: str, root: Path, url: str, repository: str) -> None:
    """Do a round for each line on stdin, and print what it took."""
    sys.path.insert(0, str(ROOT))
    from tr11ops.hub.base import Repository, find_credentials, hub_retries
    from tr11ops.hub.client import Hub
    from tr11ops.hub.sync import sync_once
    from tr11ops.hub.sync_files import RunningDigests
    from tr11ops.hub.sync_round import SyncSettings
    from tr11ops.rundir.paths import RunDirectory
    from trainer.contract.paths import RunPaths

    directory, running = (
        RunDirectory(RunPaths(root, "run", "main"), root / "kill-switch"),
        RunningDigests(),
    )
    setting = SyncSettings(
        hub=Hub(url, find_credentials(None, os.environ), hub_retries(60.0)), repository=Repository(repository),
        directory=directory, patterns=("logs/*/*.txt",), private=True, status=lambda: None, clock=time.time,
        say=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip

    def plain() -> None:
        from huggingface_hub import HfApi

        api = HfApi(url, token=os.environ["HF_TOKEN"])
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=directory.paths.published,
            allow_patterns=["logs/*/*.txt"],
        )

    for _ in sys.stdin:
        wall, used = time.perf_counter(), time.process_time()
        if tool == "sync":
            sync_once(setting, running)
        else:
            plain()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - used]), flush=True)


# ----------------------------------------------------------------------------- what is measured
def grow(path: Path, megabytes: int, chance: random.Random) -> None:
    """Append lines as a trainer writes them: numbers that differ, words that do not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="ascii") as stream:
        for _ in range(megabytes):
            numbers = chance.randbytes(120 * LINES).hex()
            stream.writelines(
                f" iteration {numbers[at : at + 240]} | elapsed time per iteration (s): {'x' * 220}|\n"
                for at in range(0, len(numbers), 240)
            )


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(way: Way, megabytes: int, more: int, folder: Path) -> list[Figure]:
    sys.path.insert(0, str(ROOT))
    from tr11ops.twin.hub.server import HubServer

    chance, figures = random.Random(1), []
    root, chunks = folder / "run", folder / "chunks"
    log = root / "run-logs" / LOG
    chunks.mkdir()
    with HubServer() as hub:
        hub.hub.chunks = chunks if way.is_chunked else None
        environment = {
            **os.environ,
            "HF_TOKEN": hub.token,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(folder / "cache"),
        }
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | (
            {} if way.is_chunked else {"HF_HUB_DISABLE_XET": "1"}
        )
        words = [sys.executable, __file__, "--worker", way.tool, str(root), hub.url, "bot/logs"]
        worker: subprocess.Popen[str] | None = None
        for name in ROUNDS:
            if name != "nothing new":
                grow(log, megabytes if name == "first" else more, chance)
            before = hub.bytes_sent() + stored(chunks)
            if worker is None:
                worker = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
                )
            seconds, used = one_round(worker)
            figures.append(
                Figure(way.name, name, seconds, used, hub.bytes_sent() + stored(chunks) - before)
            )
            if not way.is_one_process:
                worker.communicate()
                worker = None
        if worker is not None:
            worker.communicate()
    return figures


def one_round(worker: subprocess.Popen[str]) -> tuple[float, float]:
    stdin, stdout = worker.stdin, worker.stdout
    assert stdin is not None and stdout is not None
    stdin.write("round\n")
    stdin.flush()
    seconds, used = json.loads(stdout.readline())
    return seconds, used


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        tool, root, url, repository = sys.argv[2:]
        work(tool, Path(root), url, repository)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="of the log at first")
    parser.add_argument("--grow", type=int, default=10, help="megabytes between two rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="tr11-bench-") as folder:
            figures += measure(way, arguments.megabytes, arguments.grow, Path(folder))
    if arguments.json:
        print(
            json.dumps(
                {"schema": 1, "megabytes": arguments.megabytes, "rounds": to_builtins(figures)},
                indent=1,
            )
        )
        return
    print(f"{'way':26} {'round':12} {'seconds':>8} {'processor':>10} {'megabytes':>10}")
    for figure in figures:
        print(
            f"{figure.way:26} {figure.round:12} {figure.seconds:8.2f} {figure.processor_seconds:10.2f} "
            f"{figure.bytes / 1e6:10.1f}"
        )


if __name__ == "__main__":
    main()
