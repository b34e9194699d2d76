"""A loop as many people write one: FOLDER STEPS INTERVAL SECONDS [WORD...]. Two gloo ranks, a file of a
checkpoint each, no word about tr11.

On TERM it saves and leaves where `polite` is among the words; its last rank dies of it with `falls`. `forget`: starts from the beginning, whatever is there.
`nan-at-N`, `hang-at-N`, `die-at-N`, `die-once-at-N`, `die-once-in-save-N`: what happens
to it. `sleep-at-N`: its last rank sleeps for ever. `slow-save`: one lasts as long as 20 steps,
without a word. `quit-at-N`: leaves with 0 before its end.
`speaks`: its ranks say nothing but by tr11_beat.py. `last-prints`: its last rank tells of the steps.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

if "speaks" in sys.argv:  # tr11_beat.py lies where it runs
    sys.path.insert(0, str(Path.cwd()))
    from tr11_beat import asked as wished, beat

folder, steps, interval = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
seconds, words = float(os.environ.get("STEP_SECONDS", sys.argv[4])), sys.argv[5:]
dist.init_process_group("gloo")
rank = dist.get_rank()
speaks = rank == (dist.get_world_size() - 1 if "last-prints" in words else 0)
asked = torch.zeros(1)


def ask(*_):
    if "falls" in words and rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    asked.fill_(1)


if "polite" in words or "falls" in words:
    signal.signal(signal.SIGTERM, ask)


def save(step):
    (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
    if f"die-once-in-save-{step}" in words and rank == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "slow-save" in words:
        time.sleep(20 * seconds)
    torch.save({"step": step}, folder / f"step-{step}" / f"rank_{rank}.pt")
    dist.barrier()


def leave(status=0):
    sys.stdout.flush()
    os._exit(status)


start = 0
if "forget" not in words:
    found = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    start = max(found, default=0)
if rank == 0:
    print(f"begin after step {start}", flush=True)
for step in range(start + 1, steps + 1):
    time.sleep(seconds)
    value = torch.ones(1)
    dist.all_reduce(value)
    loss = 10.0 / step
    if f"nan-at-{step}" in words or step >= float(os.environ.get("NAN_AT", "inf")):
        loss = float("nan")
    if "speaks" in words:
        beat(step, loss=loss, total=steps)
        asked.fill_(wished() == "stop" or asked.item())
    elif speaks:
        print(f"at {step}/{steps} loss={loss:.4f}", flush=True)
    if f"hang-at-{step}" in words:
        time.sleep(3600)
    if f"sleep-at-{step}" in words and rank == dist.get_world_size() - 1:
        time.sleep(3600)
    if os.environ.get("HANG_AT") == str(step) and rank == 1 and not (folder / "hung").exists():
        (folder / "hung").touch()  # once
        time.sleep(3600)
    if f"die-at-{step}" in words and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"die-once-at-{step}" in words and rank == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if f"quit-at-{step}" in words:
        leave()
    stop = asked.clone()
    dist.all_reduce(stop)
    if step % interval == 0 or stop.item() or step == steps:
        save(step)
    if stop.item():
        leave()
leave()
