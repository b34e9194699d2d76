"""Does a signal to all ranks at one moment make a foreign trainer save and leave? Two ranks on this
machine, steps of a given length, one try after another.

    python benchmarks/trainer_stop.py [--trainer huggingface|lightning|agreeing] [--seconds 0.01 0.1 1]
                                      [--tries 10] [--way together|frozen] [--apart 0] [--patience 25] [--json]

A step waits two thirds of its time in the backward pass and the rest in the forward one, as a
processor waits for its GPU: in a call that no handler interrupts. `agreeing` is a loop whose ranks
gather, after each step, who has heard the signal, as Megatron's do. `--apart`: seconds from one
rank's signal to the next one's, as between two nodes. `frozen` stops all ranks while Hugging Face's
timers run out, so that these end at one moment. What has not left after `--patience` seconds is
killed. A try counts as saved where all ranks have left with 0 and the checkpoint is whole by the
trainer's dialect.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from tr11ops.dialects.dialect import dialect_content, dialect_of
from tr11ops.trainers.checkpoints import survey

RANKS = 2
FIRST_STEPS = 4  # before the signal
KILL_WAIT = 3.0  # of Hugging Face's handler, from the signal to its timer's end
START_SECONDS = 120.0
_LIBC = ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold(seconds: float) -> None:
    """Wait in a call that no signal ends before its time."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    wanted = _Time(int(seconds), int(seconds % 1 * 1e9))
    _LIBC.nanosleep(ctypes.byref(wanted), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


class Held(torch.autograd.Function):
    """The loss as it is, a step's time later."""

    @staticmethod
    def forward(context, loss, seconds):
        context.seconds = seconds
        hold(seconds / 3)
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        hold(context.seconds * 2 / 3)
        return gradient, None


class Steps:
    """How many steps each rank has begun; seen by all processes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * RANKS)

    def begin(self, rank: int) -> None:
        struct.pack_into("q", self._memory, 8 * rank, self.of(rank) + 1)

    def of(self, rank: int) -> int:
        (count,) = struct.unpack_from("q", self._memory, 8 * rank)
        return count


def train_huggingface(folder: Path, seconds: float, steps: Steps) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            words = torch.full((16,), index % 64)
            return {"input_ids": words, "labels": words}

    class Model(GPT2LMHeadModel):
        def forward(self, *words, **named):
            steps.begin(int(os.environ["RANK"]))
            output = super().forward(*words, **named)
            output.loss = Held.apply(output.loss, seconds)
            return output

    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=1 << 30, save_strategy="no", logging_steps=1 << 30,
        per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
        enable_jit_checkpoint=True, remove_unused_columns=False,
    )  # fmt: skip
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    Trainer(Model(config), arguments, train_dataset=Words()).train()


def train_lightning(folder: Path, seconds: float, steps: Steps) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def training_step(self, batch, _index):
            steps.begin(int(os.environ["RANK"]))
            return Held.apply((self.line(batch[0]) - batch[0]).pow(2).mean(), seconds)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_steps=1 << 30, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=1 << 30, save_on_exception=True)],
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(1 << 20, 8))
    trainer.fit(Line(), torch.utils.data.DataLoader(data, batch_size=2))


def train_agreeing(folder: Path, seconds: float, steps: Steps) -> None:
    rank = int(os.environ["RANK"])
    heard = torch.zeros(1, dtype=torch.int32)
    signal.signal(signal.SIGTERM, lambda *_: heard.fill_(1))
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    step = 0
    while True:
        steps.begin(rank)
        Held.apply(model(torch.randn(2, 8)).pow(2).mean(), seconds).backward()
        step += 1
        of_all = [torch.zeros(1, dtype=torch.int32) for _ in range(RANKS)]
        torch.distributed.all_gather(of_all, heard.clone())
        if any(one.item() for one in of_all):
            break
    part = folder / f"step-{step}"
    part.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step}, part / f"rank_{rank}.pt")
    torch.distributed.barrier()


TRAINERS = {
    "huggingface": train_huggingface,
    "lightning": train_lightning,
    "agreeing": train_agreeing,
}
MODULES = {
    "huggingface": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning": ("lightning.pytorch",),
}
PLAIN = {
    "name": "agreeing",
    "title": "a loop whose ranks agree",
    "checkpoints": {"name": "step-{step}", "complete": ["count rank_*.pt = {world_size}"]},
}


def start(name: str, folder: Path, seconds: float, steps: Steps) -> list[int]:
    """Fork the ranks of one try; their processes. All they say is in the folder's log."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _be_rank(name, rank, port, folder, seconds, steps)
        pids.append(pid)
    return pids


def _be_rank(name: str, rank: int, port: int, folder: Path, seconds: float, steps: Steps) -> None:
    os.setpgid(0, 0)
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    os.environ.update({key: str(value) for key, value in own.items()})
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        TRAINERS[name](folder, seconds, steps)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def ask(pids: list[int], way: str, seconds: float, apart: float) -> None:
    """TERM to all ranks at one moment, or so long after each other."""
    for pid in random.sample(pids, len(pids)):
        signal_all([pid], signal.SIGTERM)
        time.sleep(apart)
    if way == "frozen":
        time.sleep(KILL_WAIT - 0.3)
        signal_all(pids, signal.SIGSTOP)
        time.sleep(0.5 + seconds)
        signal_all(pids, signal.SIGCONT)


def leave(pids: list[int], patience: float) -> list[int | None]:
    """The exit status of each rank; None where it had to be killed."""
    until = time.monotonic() + patience
    left: dict[int, int] = {}
    while len(left) < len(pids) and time.monotonic() < until:
        for pid in pids:
            if pid not in left and (found := os.waitpid(pid, os.WNOHANG))[0]:
                left[pid] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.02)
    for pid in pids:
        if pid not in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [left.get(pid) for pid in pids]


def try_once(
    name: str, seconds: float, way: str, apart: float, patience: float, place: Path
) -> tuple[str, float]:
    """What became of one try in a word, and the seconds from the signal to the last rank's end."""
    folder = place / "out"
    folder.mkdir()
    steps = Steps()
    pids = start(name, folder, seconds, steps)
    until = time.monotonic() + START_SECONDS
    while min(steps.of(rank) for rank in range(RANKS)) < FIRST_STEPS:
        if time.monotonic() > until:
            signal_all(pids, signal.SIGKILL)
            raise SystemExit(
                f"no step in {START_SECONDS:g} s:\n{Path(f'{folder}.log').read_text()[-2000:]}"
            )
        time.sleep(0.01)
    time.sleep(random.random() * max(seconds, 0.1))
    asked = time.monotonic()
    ask(pids, way, seconds, apart)
    left = leave(pids, patience)
    took = time.monotonic() - asked
    content = PLAIN if name == "agreeing" else dialect_content(name)
    rules = dialect_of(content, name).checkpoints
    assert rules is not None
    found = survey(rules, folder, RANKS, time.time() + 3600)
    if None in left:
        word = "deadlock"
    elif any(left):
        word = f"left with {max(map(abs, left))}"
    else:
        word = "left"
    if found.whole:
        return ("saved" if word == "left" else f"saved, {word}"), took
    what = "nothing saved" if not found.found else "broken checkpoint"
    return f"{word}, {what}", took


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--trainer", choices=TRAINERS, default="huggingface")
    options.add_argument("--seconds", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    options.add_argument("--tries", type=int, default=10)
    options.add_argument("--way", choices=("together", "frozen"), default="together")
    options.add_argument("--apart", type=float, default=0.0)
    options.add_argument("--patience", type=float, default=25.0)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    for module in MODULES.get(given.trainer, ()):
        importlib.import_module(module)  # once, for all ranks
    for seconds in given.seconds:
        seen: Counter[str] = Counter()
        times = []
        for _ in range(given.tries):
            place = Path(tempfile.mkdtemp(prefix="trainer-stop-"))
            word, took = try_once(
                given.trainer, seconds, given.way, given.apart, given.patience, place
            )
            seen[word] += 1
            if word == "saved":
                times.append(took)
            shutil.rmtree(place, ignore_errors=True)
        longest = max(times, default=None)
        value = {
            "trainer": given.trainer, "way": given.way, "apart": given.apart, "seconds": seconds, "tries": given.tries,
            "outcomes": dict(seen), "longest_save_seconds": longest and round(longest, 1),
        }  # fmt: skip
        if given.json:
            print(json.dumps(value), flush=True)
        else:
            words = ", ".join(f"{count} {word}" for word, count in seen.most_common())
            print(
                f"{given.trainer}, {given.way}, {given.apart:g} s apart, steps of {seconds:g} s: {words}",
                flush=True,
            )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
