"""A loop in torchtitan's manner, with its lines and its folders: FOLDER STEPS INTERVAL.

FSDP2 and torch.distributed.checkpoint; resumes from the highest step that has its .metadata.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

folder, steps, interval = Path(sys.argv[1]) / "checkpoint", int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"[titan] {moment},000 - root - INFO - {text}", flush=True)


def state(step: int) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "train_state": {"step": torch.tensor(step)},
    }


done = 0
whole = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
if whole:
    newest = max(whole, key=lambda path: int(path.name.removeprefix("step-")))
    say(f"Loading the checkpoint from {newest}.")
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=newest)
    done = int(loaded["train_state"]["step"])
say(f"Training starts at step {done + 1}")
for step in range(done + 1, steps + 1):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))  # a slow loader of data
    hung = folder / "hung"
    if os.environ.get("HANG_AT") == str(step) and dist.get_rank() == 1 and not hung.exists():
        hung.touch()  # once
        time.sleep(3600)
    words = torch.randn(4, 16)
    if os.environ.get("NAN_AT") == str(step):
        words[0, 0] = float("nan")
    loss = model(words).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(
        f"step: {step:2}  loss: {loss.item():8.5f}  grad_norm:  0.1000  "
        "memory:  0.00GiB(0.00%)  tps: 1,234  tflops: 0.01  mfu: 0.10%"
    )
    if step % interval == 0:
        say("Saving the checkpoint.")
        dcp.save(state(step), checkpoint_id=folder / f"step-{step}")
        say("Finished saving the checkpoint in 0.10 seconds.")
say("Training completed")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch's threads abort an interpreter that ends by itself, now and then
