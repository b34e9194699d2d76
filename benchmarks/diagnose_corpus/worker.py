"""One rank of a tiny data-parallel training that breaks itself: `torchrun worker.py FAULT [RANK
[ITERATION]]`.

The lines that it prints are Megatron's; the errors are whatever Python, PyTorch and the kernel say.
`FAULTS` are called on rank RANK (-1: on all) before iteration ITERATION; a start-up fault has
iteration 0.
"""

import ctypes
import datetime
import json
import mmap
import os
import pathlib
import signal
import sys
import time
import warnings
from typing import Any

import numpy
import torch
import torch.distributed as dist

HERE = pathlib.Path(os.environ.get("CORPUS_SCRATCH", "/tmp/diagnose-corpus"))
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Samples whose reading fails in the way that `fault` names, at sample 40."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40 and self.fault == "raises":
            return torch.tensor(json.loads('{"text": "unfinished')["text"])
        if index == 40 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 40 and self.fault == "segfault":
            ctypes.string_at(0)
        if index == 40 and self.fault == "hangs":
            time.sleep(600)
        if index == 40 and self.fault == "ragged":
            return torch.zeros(7)
        if self.fault == "shm":
            return torch.zeros(4_000_000)
        if self.fault == "descriptors":
            return [torch.zeros(4) for _ in range(50)]  # type: ignore[return-value]
        return torch.zeros(8)


def loader(fault: str, **options: object) -> None:
    for _ in torch.utils.data.DataLoader(Tokens(fault), batch_size=8, num_workers=2, **options):  # type: ignore[arg-type]
        pass


def bus_error() -> None:
    path = HERE / f"train_text_document-{RANK}.bin"
    path.write_bytes(b"\0" * 8192)
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        pages[5000]


def load(content: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    path = HERE / "checkpoints" / f"mp_rank_{RANK:02d}_model_states-{content}.pt"
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(
        {"0.weight": torch.zeros(8, 8), "0.bias": torch.zeros(8), "1.weight": torch.zeros(8, 4)},
        path,
    )
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:700])
    elif content == "empty":
        path.write_bytes(b"")
    elif content == "zeros":
        path.write_bytes(b"\0" * len(path.read_bytes()))
    elif content == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:9a2f\nsize 1325\n")
    elif content == "flipped":
        raw = bytearray(path.read_bytes())
        raw[300:340] = b"x" * 40
        path.write_bytes(bytes(raw))
    elif content == "object":
        torch.save({"args": pathlib.PosixPath("x"), "numpy": numpy.float64(1).dtype}, path)
    elif content == "missing":
        path.unlink()
    state = torch.load(path, weights_only=True)
    if content == "optimizer":
        other = torch.optim.Adam(torch.nn.Sequential(torch.nn.Linear(8, 8)).parameters())
        torch.optim.Adam([{"params": [p]} for p in model.parameters()]).load_state_dict(
            other.state_dict()
        )
    model.load_state_dict(state)


def save() -> None:
    torch.save(
        {f"layer_{i:02d}": torch.zeros(1000, 1000) for i in range(8)},
        HERE / "full" / f"model_{RANK:02d}.pt",
    )


def divisible(batch: int, micro: int) -> None:
    assert batch % micro == 0, (
        f"global batch size ({batch}) is not divisible by micro batch size ({micro})"
    )


def copy_of(function: Any) -> Any:
    return function(function)


def read_index(path: str) -> None:
    with open(path, "rb") as file:  # noqa: PTH123
        magic = file.read(9)
    assert magic == b"MMIDIDX\0\0", (
        "Index file doesn't match expected format. Make sure that --dataset-impl is configured properly."
    )


def as_other_user(act: str) -> None:
    """What root may do, user 65534 may not."""
    os.setuid(65534)
    if act == "read":
        numpy.memmap(HERE / "secret_text_document.bin", dtype=numpy.uint16)
    else:
        pathlib.Path(HERE / "quota" / f"zero_pp_rank_{RANK}_optim_states.pt").write_bytes(
            b"\0" * 8_000_000
        )


def unequal() -> None:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=8))


FAULTS = {
    "none": lambda: None,
    "value-error": lambda: int("12 tokens"),
    "key-error": lambda: {"text": 1}["input_ids"],
    "import-error": lambda: __import__("flash_attn"),
    "attribute-error": lambda: torch.nn.Linear(2, 2).wieght,
    "type-error": lambda: torch.nn.Linear(2, 2)(torch.zeros(2), attention_mask=None),
    "name-error": lambda: eval("micro_batch * 2"),
    "zero-division": lambda: WORLD // (WORLD - WORLD),
    "assertion": lambda: divisible(32, 3),
    "recursion": lambda: copy_of(copy_of),
    "dtype": lambda: torch.zeros(4, 4, dtype=torch.bfloat16) @ torch.zeros(4, 4),
    "shape": lambda: torch.nn.Linear(1024, 8)(torch.zeros(4, 512)),
    "vocabulary": lambda: torch.nn.Embedding(100, 8)(torch.tensor([3, 250000])),
    "backward": lambda: torch.zeros(3).sum().backward(),
    "json": lambda: json.loads(pathlib.Path(__file__).read_text()),
    "unicode": b"caf\xe9 au lait".decode,
    "no-data": lambda: numpy.memmap(HERE / "data" / "oscar_text_document.bin"),
    "bad-index": lambda: read_index(__file__),
    "denied": lambda: as_other_user("read"),
    "quota": lambda: as_other_user("write"),
    "read-only": lambda: (HERE / "read-only" / "latest").write_text("global_step100"),
    "disk-full": save,
    "memory-error": lambda: bytearray(1 << 45),
    "numpy-memory": lambda: numpy.ones((1 << 22, 1 << 18)),
    "torch-memory": lambda: torch.empty(1 << 45),
    "grow": lambda: [torch.ones(10_000_000) for _ in range(1000)],
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigsegv": lambda: ctypes.string_at(0),
    "sigabrt": os.abort,
    "sigfpe": lambda: os.kill(os.getpid(), signal.SIGFPE),
    "sigill": lambda: os.kill(os.getpid(), signal.SIGILL),
    "sigbus": bus_error,
    "silent-exit": lambda: os._exit(7),
    "sys-exit": lambda: sys.exit("tokenizer vocabulary (50257) is larger than the padded one (50176)"),
    "hang": lambda: time.sleep(600),
    "unequal": lambda: unequal() if RANK else time.sleep(600),
    "nan": lambda: exec("assert not torch.tensor(float('nan')).isnan(), f'Rank {r}: found NaN in local grad norm in"
                        " backward pass before data-parallel communication collective. Device: cpu'",
                        {"torch": torch, "r": RANK}),
    "anomaly": lambda: torch.distributions.Categorical(logits=torch.full((2,), float("nan"))),
    "mismatch": lambda: dist.all_reduce(torch.zeros(3 if RANK else 5)),
    "loader-raises": lambda: loader("raises"),
    "loader-killed": lambda: loader("killed"),
    "loader-segfault": lambda: loader("segfault"),
    "loader-hangs": lambda: loader("hangs", timeout=5),
    "loader-shm": lambda: loader("shm"),
    "loader-ragged": lambda: loader("ragged"),
    "loader-descriptors": lambda: loader("descriptors"),
    **{f"load-{c}": (lambda c=c: load(c)) for c in ("truncated", "empty", "zeros", "text", "flipped", "object",
                                                     "missing", "keys", "optimizer")},
}  # fmt: skip


def main() -> None:
    fault, rank, at = (*sys.argv[1:], "0", "5")[:3] if len(sys.argv) < 4 else sys.argv[1:4]
    stop = os.environ.get("CORPUS_STOP", "")
    if RANK == 0:
        print(
            f"using world size: {WORLD}, data-parallel-size: {WORLD}, tensor-model-parallel size: 1",
            flush=True,
        )
        print("> initializing torch distributed ...", flush=True)
        warnings.warn(
            "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
            stacklevel=1,
        )
    mine = int(rank) in (RANK, -1)
    if int(at) == 0 and mine:
        FAULTS[fault]()
    dist.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=int(os.environ.get("CORPUS_TIMEOUT", "60")))
    )
    model = torch.nn.Linear(64, 64)
    if RANK == 0:
        print(
            " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 4160",
            flush=True,
        )
        print("training ...", flush=True)
    total, consumed = 40, 0
    for iteration in range(1, int(os.environ.get("CORPUS_ITERATIONS", "12")) + 1):
        started = time.time()
        if iteration == int(at) and mine:
            FAULTS[fault]()
        loss = (model(torch.randn(32, 64)) ** 2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        consumed += 32 * WORLD
        time.sleep(0.05)
        if RANK == WORLD - 1:
            print(
                f" iteration {iteration:8d}/{total:8d} | consumed samples: {consumed:12d} | elapsed time per iteration"
                f" (s): {time.time() - started:.2f} | learning rate: {6e-5:.3E} | global batch size: {32 * WORLD:5d} |"
                f" lm loss: {10 + loss.item() - iteration / 9:.6E} | grad norm: {1.2:.3f} | num zeros: 0.0 | number of"
                " skipped iterations:   0 | number of nan iterations:   0 |", flush=True)  # fmt: skip
        if RANK == 0 and iteration % 4 == 0:
            place = f"checkpoint at iteration {iteration:7d} to /scratch/checkpoints/tr11"
            print(f"saving {place}\n  successfully saved {place}", flush=True)
    if RANK == 0:
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        print(
            stop.format(now=now) if stop else f"[after training is done] datetime: {now} ",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
