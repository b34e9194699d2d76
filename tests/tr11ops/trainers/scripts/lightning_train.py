"""A script as people write one with Lightning: FOLDER STEPS [CHECKPOINT]."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        loss = (self.line(batch[0]) - batch[0]).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


folder, steps, *checkpoint = sys.argv[1:]
data = torch.utils.data.TensorDataset(torch.randn(512, 8))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=int(steps),
    logger=False,
    callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=8, save_top_k=-1)],
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
