"""A script as people write one with Lightning: FOLDER STEPS [CHECKPOINT].

In its environment, what happens to it: STEP_SECONDS, NAN_AT, HANG_AT (its rank 1 waits for ever at this
step, once). BAR=tqdm: its bar is drawn while it trains, as where rich is not installed.
"""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

folder, steps, *checkpoint = sys.argv[1:]


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(8, 8)

    def on_train_batch_start(self, batch, index):
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        hung = Path(folder) / "hung"
        if self.is_step("HANG_AT") and self.global_rank == 1 and not hung.exists():
            hung.touch()
            time.sleep(3600)

    def training_step(self, batch, index):
        loss = (self.line(batch[0]) - batch[0]).pow(2).mean()
        if self.is_step("NAN_AT"):
            loss = loss * float("nan")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def is_step(self, name):
        return os.environ.get(name) == str(self.global_step + 1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


workers = int(os.environ["LOCAL_WORLD_SIZE"])
callbacks = [ModelCheckpoint(dirpath=folder, every_n_train_steps=8, save_top_k=-1)]
if os.environ.get("BAR") == "tqdm":
    callbacks.append(TQDMProgressBar())
data = torch.utils.data.TensorDataset(torch.randn(512, 8))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=workers,
    num_nodes=int(os.environ["WORLD_SIZE"]) // workers,
    strategy="ddp",
    max_steps=int(steps),
    logger=False,
    callbacks=callbacks,
)
trainer.fit(
    Line(),
    torch.utils.data.DataLoader(data, batch_size=2),
    ckpt_path=checkpoint[0] if checkpoint else None,
)
# the last one out would else find its peer's store gone
trainer.strategy.barrier()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch's threads abort an interpreter that ends by itself, now and then
