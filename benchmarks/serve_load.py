"""What 200 readers of `tr11 serve` cost a training on the same machine: its steps with the readers and
without them, by turns, in one run of the embedded scheduler.

    python benchmarks/serve_load.py [--clients 200] [--seconds 60] [--turns 3]

Each reader is a browser's: it holds the stream of changes open, and asks for the list or a run's page
again whenever the server says that something has changed. The server runs all the time, niced as
docs/how-to/serve.md says; the readers are one process, niced as well, since theirs is the work of
other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TR11 = str(Path(sys.executable).parent / "tr11")
CARD = Path(__file__).parents[1] / "slurm" / "demo.toml"
PORT = 8817
ONE_WORKER = {
    "slurm.nodes": 1,
    "slurm.workers_per_node": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "batch.train_samples": 10_000_000,
    "run.exit_duration_minutes": 580,
    "evaluation.interval": 1_000_000,
    "checkpoint.interval": 1_000_000,
}
MOST_WAIT_SECONDS = 600.0


# ----------------------------------------------------------------------------- readers
async def read(key: str, until: float, seen: list[float]) -> None:
    """One reader: the stream, and a page for each change it tells of."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while (left := until - time.monotonic()) > 0:
        try:
            line = await asyncio.wait_for(reader.readline(), left)
        except TimeoutError:
            break
        if not line:
            raise RuntimeError("the server has ended a stream")
        if line.startswith(b"event: change"):
            began = time.monotonic()
            await page(f"/run/{key}" if key else "/")
            seen.append(time.monotonic() - began)
    writer.close()


async def page(path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    asked = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Part: 1\r\nConnection: close\r\n\r\n"
    writer.write(asked.encode())
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path}: {answer[:40]!r}")


async def served_runs() -> list[dict[str, object]]:
    """The runs that the server shows now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(b"GET /runs.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["runs"]
    writer.close()
    return found


async def clients(count: int, seconds: float) -> list[float]:
    """How long each page took."""
    [run] = await served_runs()
    seen: list[float] = []
    until = time.monotonic() + seconds
    keys = ("", run["key"])
    await asyncio.gather(*(read(keys[number % 2], until, seen) for number in range(count)))
    return seen


# ----------------------------------------------------------------------------- the run
def typed(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [TR11, *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"tr11 {' '.join(words)}: {done.stdout}{done.stderr}")


def environment(folder: Path) -> dict[str, str]:
    own = {"TR11_LOCAL_SCHEDULER": str(folder / "scheduler"), "TR11_LOCAL_NODES": "1"}
    return {**os.environ, **own}


def launch(folder: Path) -> None:
    shutil.copy(CARD, folder / "tr11.toml")
    data = "demo-run/data"
    typed(folder, "data", "corpus", "--out", f"{data}/corpus.jsonl")
    given = ("--corpus", f"{data}/corpus.jsonl", "--vocab-size", "4096")
    typed(folder, "data", "tokenizer", *given, "--out", f"{data}/tokenizer")
    given = ("--input", f"{data}/corpus.jsonl", "--tokenizer", f"{data}/tokenizer")
    typed(folder, "data", "preprocess", *given, "--output-prefix", f"{data}/corpus")
    words = [f"--set={key}={value}" for key, value in ONE_WORKER.items()]
    words += ["--set=slurm.time_limit=10:00:00"]
    typed(folder, "launch", "--array", "1-1", "--scheduler", "local", "--yes", *words)


def steps(folder: Path) -> list[tuple[float, float]]:
    """Of each step so far: when it ended, and how long it took."""
    found = []
    for place in folder.glob("demo-run/*-logs/logs/main/metrics.jsonl"):
        for line in place.read_text().splitlines():
            told = json.loads(line)
            if told.get("kind") == "step":
                found.append((told["time"], told["seconds_per_iteration"]))
    return found


def wait_for_steps(folder: Path, count: int) -> None:
    end = time.monotonic() + MOST_WAIT_SECONDS
    while len(steps(folder)) < count:
        if time.monotonic() > end:
            raise SystemExit("the training does not step")
        time.sleep(1.0)


def wait_for_server(server: subprocess.Popen[bytes]) -> None:
    """Until it has looked at the run."""
    end = time.monotonic() + MOST_WAIT_SECONDS
    while True:
        try:
            if any(run["iteration"] != "none yet" for run in asyncio.run(served_runs())):
                return
        except OSError:
            pass  # it does not listen yet
        if server.poll() is not None or time.monotonic() > end:
            raise SystemExit("the server shows no run")
        time.sleep(1.0)


def turn(folder: Path, count: int, seconds: float) -> tuple[list[float], list[float]]:
    """The seconds of each step in one turn, and those of each page."""
    began, shown = time.time(), []
    if count:
        line = [sys.executable, __file__, "--only-clients", str(count), "--seconds", str(seconds)]
        done = subprocess.run(
            ["nice", "-n", "19", *line], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        shown = json.loads(done.stdout)
    else:
        time.sleep(seconds)
    ended = time.time()
    return [took for when, took in steps(folder) if began < when - took and when < ended], shown


def measure(folder: Path, count: int, seconds: float, turns: int) -> None:
    launch(folder)
    line = ["nice", "-n", "19", TR11, "serve", "--listen", str(PORT), "--scheduler", "local", "."]
    server = subprocess.Popen(line, cwd=folder, env=environment(folder), stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(folder, 20)
        wait_for_server(server)
        alone: list[float] = []
        beside: list[float] = []
        pages: list[float] = []
        for number in range(turns):
            for clients_now in (0, count):
                took, shown = turn(folder, clients_now, seconds)
                (beside if clients_now else alone).extend(took)
                pages += shown
                load = os.getloadavg()[0]
                median = statistics.median(took)
                print(
                    f"turn {number + 1}, {clients_now:3} readers: {len(took):4} steps,"
                    f" median {median:.4f} s, load {load:.1f}",
                    flush=True,
                )
        ratio = statistics.median(beside) / statistics.median(alone)
        print(f"step with {count} readers / without: {ratio:.3f}")
        print(f"pages: {len(pages)}, median {statistics.median(pages):.2f} s")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        typed(
            folder,
            "kill",
            "--now",
            "--wait",
            "--yes",
            "--reason",
            "measured",
            "--scheduler",
            "local",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only-clients", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_clients:
        print(json.dumps(asyncio.run(clients(given.only_clients, given.seconds))))
        return
    with tempfile.TemporaryDirectory(prefix="tr11-serve-load-") as folder:
        measure(Path(folder), given.clients, given.seconds, given.turns)


if __name__ == "__main__":
    main()
