"""A script as people write one with Hugging Face's Trainer: resumes from the last checkpoint.

In its environment, what happens to it: STEP_SECONDS, NAN_AT, HANG_AT (its rank 1 waits for ever at this
step, once).
"""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Mishaps(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        step = str(state.global_step + 1)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if os.environ.get("NAN_AT") == step:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        hung = Path(args.output_dir) / "hung"
        if os.environ.get("HANG_AT") == step and args.process_index == 1 and not hung.exists():
            hung.touch()
            time.sleep(3600)


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
last = None
if Path(arguments.output_dir).is_dir():
    last = get_last_checkpoint(arguments.output_dir)
trainer = Trainer(model, arguments, train_dataset=Words(), callbacks=[Mishaps()])
trainer.train(resume_from_checkpoint=last)
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # torch's threads abort an interpreter that ends by itself, now and then
