"""A preprocess or a merge that was interrupted, at any point and by anything, goes on and ends with the
same bytes.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.child_requests import request_of
from tests.trainer.data.data_helpers import ROOT, run_data, texts, write_lines
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data import commands_make as merging, indexed_write, pair_work
from trainer.data.commands_make import merge
from trainer.data.encode import PreprocessRequest
from trainer.data.indexed import bin_path, idx_path
from trainer.data.indexed_write import IndexedWriter
from trainer.data.tokenize import preprocess

# Runs a command in one fork after another. Life n of a story is killed with -9 at its step
# `steps[n]`, counted over every call that changes what is on disk, and every piece; the last life
# runs to its end. Prints what each life was told. `setup` and `work` are Python: `work` makes
# `output` (a path in a folder of the story's own) and calls `point` and `tell`.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
root, stories, setup, work = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
exec(setup)

def life(output, step):
    count = 0
    def point(*_):
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
    def counted(call):
        def wrapped(*arguments, **options):
            point()
            return call(*arguments, **options)
        return wrapped
    for owner, name in ((os, "fsync"), (os, "pwrite"), (os, "truncate"), (os, "unlink"), (os, "replace")):
        setattr(owner, name, counted(getattr(owner, name)))
    told = []
    exec(work, {**globals(), "output": output, "point": point, "tell": told.append})
    print(json.dumps([step, count, told]), flush=True)

for number, steps in enumerate(stories):
    for step in [*steps, -1]:
        child = os.fork()
        if child == 0:
            life(root / f"story{number}" / "out", step)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGKILL if step >= 0 else 0) or code == 0, code
"""


class Lives(Record):
    """`longest`: steps of the longest life that a kill was planned for. `last`: of each story's
    last life, its number of steps and what it was told.
    """

    longest: int
    last: list[tuple[int, list[str]]]


def run_lives(root: Path, stories: list[list[int]], setup: str, work: str) -> Lives:
    """Run all stories; the output of number N is `root/storyN/out`."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(root), json.dumps(stories), setup, work],
        cwd=ROOT, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    return Lives(
        max(count for step, count, _ in lives if step >= 0),
        [(count, told) for step, count, told in lives if step < 0],
    )


PIECE = 2000


def pair_of(prefix: Path) -> tuple[bytes, bytes]:
    return bin_path(f"{prefix}_text_document").read_bytes(), idx_path(
        f"{prefix}_text_document"
    ).read_bytes()


def asked(
    folder: Path, tokenizer: Path, name: str = "out", source: str = "in.jsonl", **more: object
) -> PreprocessRequest:
    return PreprocessRequest(folder / source, tokenizer, str(folder / name / "out"), **more)  # type: ignore[arg-type]


class Stop(BaseException):
    """What a signal raises."""


def interrupt(request: PreprocessRequest, pieces: int, save_seconds: float = 1000.0) -> list[str]:
    """Stop a preprocess from within after some pieces; what it told."""
    told: list[str] = []
    left = pieces

    def count(*_: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Stop

    with pytest.raises(Stop):
        preprocess(
            request,
            on_progress=count,
            piece_bytes=PIECE,
            tell=told.append,
            save_seconds=save_seconds,
        )
    return told


def run_stopped(script: str, words: Sequence[object]) -> None:
    """Run a command that a signal stops on its way: it says what it kept, and nothing is cut."""
    done = subprocess.run(
        [sys.executable, "-c", script, request_of("data", words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    kept, stopped = done.stderr.splitlines()
    assert kept.startswith("kept: ") and stopped == "stopped; no output is half-written"


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_killed_at_every_step(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Once at each step of its life, and in life after life."""
    write_lines(tmp_path / "in.jsonl", texts(60))
    preprocess(asked(tmp_path, tokenizer_folder, "whole"))
    steps = 60  # more than one life has
    stories = [*([step] for step in range(steps)), [14] * 9, [22, 3, 4, 18, 0, 9]]
    lives = run_lives(
        tmp_path,
        stories,
        "from trainer.data.tokenize import PreprocessRequest, preprocess",
        f"request = PreprocessRequest(root / 'in.jsonl', Path({str(tokenizer_folder)!r}), str(output))\n"
        f"preprocess(request, piece_bytes={2 * PIECE}, on_progress=point, tell=tell, save_seconds=0.0)",
    )
    assert 30 < lives.longest < steps, "each step of a life was a moment of death"
    for step in range(20, lives.longest):  # the first piece is on record by then
        count, told = lives.last[step]
        went_on = bool(told) and told[0].startswith("goes on behind line")
        assert went_on or (told == [] and count < 12), "what was left to do was to publish, at most"
    wanted = pair_of(tmp_path / "whole" / "out")
    for number in range(len(stories)):
        folder = tmp_path / f"story{number}"
        assert pair_of(folder / "out") == wanted, stories[number]
        # A kill inside the writing of the record that stays may leave its temporary file, as
        # everywhere.
        left = {
            path.name
            for path in folder.iterdir()
            if not path.name.startswith(".out_text_document.report.json.")
        }
        assert left == {f"out_text_document.{end}" for end in ("bin", "idx", "report.json")}, (
            stories[number]
        )
        report = json.loads((folder / "out_text_document.report.json").read_text())["report"]
        assert (report["documents"], report["input_bytes"]) == (
            60,
            (tmp_path / "in.jsonl").stat().st_size,
        )


@pytest.mark.parametrize("kind", ["plain", "gz"])
def test_only_the_rest_is_tokenized(tmp_path: Path, tokenizer_folder: Path, kind: str) -> None:
    write_lines(tmp_path / "in.jsonl", [*texts(100), "beta <|endoftext|>"])
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write("broken\n" + '{"text": ""}\n' + '{"text": "end"}\n')
    (tmp_path / "in.gz").write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    source = {"plain": "in.jsonl", "gz": "in.gz"}[kind]
    request = asked(tmp_path, tokenizer_folder, "out", source, skip_bad_lines=True)
    whole = preprocess(asked(tmp_path, tokenizer_folder, "whole", "in.jsonl", skip_bad_lines=True))
    [kept] = interrupt(request, 6)
    assert kept.startswith("kept: ") and "--force" in kept
    assert not bin_path(request.prefix).exists()
    told: list[str] = []
    heard: list[tuple[int, int, int]] = []
    report = preprocess(
        request,
        piece_bytes=PIECE,
        tell=told.append,
        on_progress=lambda *counts: heard.append(counts),
    )
    done_before = heard[0][1]
    assert done_before > 20 and told == [
        f"goes on behind line {done_before:,}, where an earlier run was interrupted"
    ]
    assert sum(documents for _, documents, _ in heard) == report.documents == 102
    assert sum(size for size, _, _ in heard) == (tmp_path / source).stat().st_size
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")
    same = (
        "documents",
        "tokens",
        "input_bytes",
        "empty_texts",
        "bad_lines",
        "bad_line_reports",
        "end_token_lines",
    )
    assert [getattr(report, name) for name in same] == [getattr(whole, name) for name in same]
    assert report.bad_lines == 1 and report.end_token_lines == (101,)
    assert preprocess(request).already_complete and hidden(tmp_path / "out") == []


@pytest.mark.parametrize("sentences", [False, True])
def test_other_workers_go_on(tmp_path: Path, tokenizer_folder: Path, sentences: bool) -> None:
    write_lines(tmp_path / "in.jsonl", [f"{text}. Next one! {text}" for text in texts(60)])
    interrupt(asked(tmp_path, tokenizer_folder, sentences=sentences), 3)
    preprocess(asked(tmp_path, tokenizer_folder, "whole", sentences=sentences))
    request = asked(tmp_path, tokenizer_folder, workers=2 if sentences else 1, sentences=sentences)
    told: list[str] = []
    preprocess(request, tell=told.append)
    whole = asked(tmp_path, tokenizer_folder, "whole", sentences=sentences)
    assert told[0].startswith("goes on behind line")
    assert bin_path(request.prefix).read_bytes() == bin_path(whole.prefix).read_bytes()
    assert idx_path(request.prefix).read_bytes() == idx_path(whole.prefix).read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("input", "input bytes, input modified changed"),
        ("option", "append eod changed"),
        ("tokens", "its files are not as it left them"),
        ("short", "its files are not as it left them"),
        ("record", "cannot be read"),
        ("no record", "it left no record"),
    ],
)
def test_what_cannot_be_gone_on_with_starts_from_the_beginning(
    tmp_path: Path, tokenizer_folder: Path, change: str, reason: str
) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60))
    request = asked(tmp_path, tokenizer_folder, append_eod=change != "option")
    interrupt(asked(tmp_path, tokenizer_folder), 3)
    partial = tmp_path / "out" / ".out_text_document.bin.partial"
    record = tmp_path / "out" / ".out_text_document.progress.partial"
    if change == "input":
        write_lines(tmp_path / "in.jsonl", texts(61))
    if change == "tokens":
        data = bytearray(partial.read_bytes())
        data[40] ^= 1
        partial.write_bytes(data)
    if change == "short":
        os.truncate(partial, 40)
    if change == "record":
        record.write_text("{}")
    if change == "no record":
        record.unlink()
    told: list[str] = []
    preprocess(request, tell=told.append)
    [line] = told
    assert line.startswith("what an interrupted run left cannot be gone on with") and reason in line
    whole = asked(tmp_path, tokenizer_folder, "whole", append_eod=change != "option")
    preprocess(whole)
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")
    assert hidden(tmp_path / "out") == []


def test_force_starts_from_the_beginning_and_says_nothing(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60))
    interrupt(asked(tmp_path, tokenizer_folder), 3)
    told: list[str] = []
    heard: list[int] = []
    preprocess(
        asked(tmp_path, tokenizer_folder),
        True,
        lambda size, *_: heard.append(size),
        PIECE,
        tell=told.append,
    )
    assert (
        told == []
        and sum(heard) == (tmp_path / "in.jsonl").stat().st_size
        and hidden(tmp_path / "out") == []
    )


def test_a_faulty_input_leaves_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60))
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write("broken\n")
    with pytest.raises(DataError, match="line 61"):
        preprocess(asked(tmp_path, tokenizer_folder), piece_bytes=PIECE, save_seconds=0.0)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_keeps_what_was_saved(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(600))
    code = (
        "import sys; from pathlib import Path; from trainer.data.tokenize import *; from trainer.contract.errors import *\n"
        "try: preprocess(PreprocessRequest(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]), piece_bytes=2000,"
        " tell=print, save_seconds=0.0)\n"
        "except DataError as error: print(error)"
    )
    words = [tmp_path / "in.jsonl", tokenizer_folder, tmp_path / "out" / "out"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )  # fmt: skip
    kept, failed = done.stdout.splitlines()
    assert kept.startswith("kept: ") and "writing" in failed, done.stderr
    told: list[str] = []
    preprocess(asked(tmp_path, tokenizer_folder), tell=told.append)
    preprocess(asked(tmp_path, tokenizer_folder, "whole"))
    assert told[0].startswith("goes on behind line")
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")


def test_the_command_says_what_is_kept_and_goes_on(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60) * 60)
    words = ["preprocess", "--input", tmp_path / "in.jsonl", "--tokenizer", tokenizer_folder, "--workers", "1",
             "--output-prefix", tmp_path / "out" / "out"]  # fmt: skip
    stopped_at_the_second_piece = """
import os, signal, sys
from trainer.data import __main__ as command, commands_make as room
def interrupted(request, force, on_progress, tell):
    pieces = []
    def count(*counts):
        on_progress(*counts)
        pieces.append(counts)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    return whole(request, force, count, tell=tell)
whole, room.preprocess = room.preprocess, interrupted
sys.exit(command.main())
"""
    run_stopped(stopped_at_the_second_piece, words)
    again = run_data(*words)
    assert again.returncode == 0 and again.stderr.startswith("goes on behind line ")
    preprocess(asked(tmp_path, tokenizer_folder, "whole"))
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ESTALE, "Stale file handle")])
@pytest.mark.parametrize(
    ("name", "call"), [("_crc_of", 1), ("_crc_of", 3), ("read_json", 1), ("read_json", 2)]
)
def test_what_stops_the_look_at_what_is_left_takes_nothing_away(
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    call: int,
    error: BaseException,
) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60))
    request = asked(tmp_path, tokenizer_folder)
    interrupt(request, 3)
    left = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    room = {"_crc_of": indexed_write, "read_json": pair_work}[name]
    whole, calls = getattr(room, name), itertools.count(1)

    def failing(*arguments: Any) -> Any:
        if next(calls) == call:
            raise error
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(room, name, failing)
        with pytest.raises(
            KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DataError
        ):
            preprocess(request, piece_bytes=PIECE)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == left
    told: list[str] = []
    preprocess(request, tell=told.append)
    preprocess(asked(tmp_path, tokenizer_folder, "whole"))
    assert told[0].startswith("goes on behind line")
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")


def test_a_record_that_cannot_be_read_on_the_way_out_is_kept(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", texts(60))
    request = asked(tmp_path, tokenizer_folder)

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    pieces = itertools.count(1)

    def stop(*_: int) -> None:
        if next(pieces) == 3:
            monkeypatch.setattr(pair_work, "read_json", failing)
            monkeypatch.setattr(pair_work.HalfMade, "_write", failing)
            raise Stop

    told: list[str] = []
    with pytest.raises(Stop):
        preprocess(request, on_progress=stop, piece_bytes=PIECE, tell=told.append, save_seconds=0.0)
    assert told and told[0].startswith("kept: ")
    monkeypatch.undo()
    told.clear()
    preprocess(request, tell=told.append)
    preprocess(asked(tmp_path, tokenizer_folder, "whole"))
    assert told[0].startswith("goes on behind line")
    assert pair_of(tmp_path / "out" / "out") == pair_of(tmp_path / "whole" / "out")


BLOCK = 6000  # bytes copied at a time


def write_sources(folder: Path) -> list[Path]:
    """Three pairs of several blocks, with sentences, with an empty sequence and with empty
    documents at both ends.
    """
    random = np.random.default_rng(3)
    prefixes = []
    for number in range(3):
        lengths = random.integers(0, 200, 40).astype(np.int32)
        ends = np.sort(random.integers(0, 40, 12))
        with IndexedWriter(folder / f"in{number}", "uint16") as writer:
            writer.add_sequences(
                random.integers(0, 4000, int(lengths.sum())).astype(np.uint16),
                lengths,
                np.array([0, *ends, 40, 40]),
            )
        prefixes.append(folder / f"in{number}")
    return prefixes


def merged_pair(prefix: Path) -> tuple[bytes, bytes]:
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


def joined(prefixes: list[Path]) -> bytes:
    return b"".join(bin_path(prefix).read_bytes() for prefix in prefixes)


def test_a_merge_killed_at_every_step(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    merge(prefixes, tmp_path / "whole")
    assert merged_pair(tmp_path / "whole")[0] == joined(prefixes)
    steps = 90  # more than one life has
    stories = [*([step] for step in range(steps)), [14] * 9, [30, 3, 4, 25, 0, 9]]
    lives = run_lives(
        tmp_path,
        stories,
        f"from trainer.data import commands_make as room\nroom.COPY_BYTES = {BLOCK}",
        "room.merge([root / f'in{n}' for n in range(3)], output, point, tell=tell, save_seconds=0.0)",
    )
    assert 40 < lives.longest < steps, "each step of a life was a moment of death"
    for step in range(20, lives.longest):  # the first block is on record by then
        count, told = lives.last[step]
        went_on = bool(told) and told[0].startswith("goes on behind ")
        assert went_on or (told == [] and count < 12), "what was left to do was to publish, at most"
    for number in range(len(stories)):
        folder = tmp_path / f"story{number}"
        assert merged_pair(folder / "out") == merged_pair(tmp_path / "whole"), stories[number]
        left = {
            path.name for path in folder.iterdir() if not path.name.startswith(".out.report.json.")
        }
        assert left == {"out.bin", "out.idx", "out.report.json"}, stories[number]


def test_a_full_disk_keeps_what_was_merged(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    code = (
        "import sys; from trainer.data import commands_make as room; from trainer.contract.errors import *\n"
        f"room.COPY_BYTES = {BLOCK}\n"
        "try: room.merge(sys.argv[2:], sys.argv[1], tell=print, save_seconds=0.0)\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "all"), *map(str, prefixes)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)),
    )  # fmt: skip
    kept, failed = done.stdout.splitlines()
    assert (
        kept.startswith("kept: ")
        and "tokens; the same command goes on" in kept
        and "writing" in failed
    ), done.stderr
    assert not bin_path(tmp_path / "all").exists()
    told: list[str] = []
    heard: list[int] = []
    merge(prefixes, tmp_path / "all", heard.append, tell=told.append)
    assert told[0].startswith("goes on behind ") and sum(heard) == len(joined(prefixes))
    assert merged_pair(tmp_path / "all")[0] == joined(prefixes)

    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "other"), *map(str, prefixes)],
        cwd=ROOT, capture_output=True, check=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, 14_000)),
    )  # fmt: skip
    os.utime(bin_path(prefixes[0]), (1, 1))
    told.clear()
    merge(prefixes, tmp_path / "other", tell=told.append)
    assert told == [
        "what an interrupted run left cannot be gone on with (since then input modified changed): starting from the"
        " beginning"
    ]
    assert merged_pair(tmp_path / "other") == merged_pair(tmp_path / "all")


def test_a_source_that_shrinks_or_changes_type_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = write_sources(tmp_path)
    with IndexedWriter(tmp_path / "wide", "int32") as writer:
        writer.add_sequences(np.arange(3, dtype=np.int32), np.array([3], dtype=np.int32))
    with pytest.raises(DataError, match="only pairs of one type"):
        merge([*prefixes, tmp_path / "wide"], tmp_path / "all")
    monkeypatch.setattr(merging, "COPY_BYTES", BLOCK)
    sizes = iter([bin_path(prefixes[1]).stat().st_size])

    def shrink(_: int) -> None:
        for size in sizes:
            os.truncate(bin_path(prefixes[1]), size - 100)

    with pytest.raises(DataError, match="became shorter while it was read"):
        merge(prefixes, tmp_path / "all", shrink, save_seconds=0.0)
    assert not bin_path(tmp_path / "all").exists()


def test_the_merge_command_says_what_is_kept_and_goes_on(tmp_path: Path) -> None:
    prefixes = write_sources(tmp_path)
    stopped_at_the_second_block = f"""
import os, signal, sys
from trainer.data import __main__ as command, commands_make as room
room.COPY_BYTES = {BLOCK}
def interrupted(prefixes, output, on_bytes, *rest, **more):
    blocks = []
    def count(size):
        on_bytes(size)
        blocks.append(size)
        if len(blocks) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    return whole(prefixes, output, count, *rest, **more)
whole, room.merge = room.merge, interrupted
sys.exit(command.main())
"""
    words = ["merge", *prefixes, "--output-prefix", tmp_path / "all"]
    run_stopped(stopped_at_the_second_block, words)
    again = run_data(*words)
    assert again.returncode == 0 and again.stderr.startswith("goes on behind ")
    assert merged_pair(tmp_path / "all")[0] == joined(prefixes)
    record = json.loads((tmp_path / "all.report.json").read_text())
    assert record["report"]["tokens"] * 2 == len(joined(prefixes))
