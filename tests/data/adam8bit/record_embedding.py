"""Records what bitsandbytes' StableEmbedding does, for
tests/trainer/model/test_stable_embedding.py.

    pip install "bitsandbytes==0.50.2"
    python -m tests.data.adam8bit.record_embedding tests/data/adam8bit/stable_embedding.npz

bitsandbytes is needed for this alone.
"""

from __future__ import annotations

import sys

import bitsandbytes  # type: ignore[import-not-found]
import numpy as np
import torch

ROWS, COLUMNS = 48, 16
WIDE = (4096, 64)  # of which the largest weight at the start is recorded


if __name__ == "__main__":
    torch.manual_seed(11)
    embedding = bitsandbytes.nn.StableEmbedding(ROWS, COLUMNS)
    with torch.no_grad():
        embedding.norm.weight.copy_(torch.rand(COLUMNS) + 0.5)
        embedding.norm.bias.copy_(torch.randn(COLUMNS) * 0.1)
    tokens = torch.randint(ROWS, (3, 20))
    result = embedding(tokens)
    upstream = torch.randn_like(result)
    result.backward(upstream)
    wide = bitsandbytes.nn.StableEmbedding(*WIDE)
    wide.weight.grad = torch.randn_like(wide.weight)
    optimizer = bitsandbytes.optim.AdamW8bit(wide.parameters())
    optimizer.step()
    np.savez_compressed(
        sys.argv[1],
        version=np.array(bitsandbytes.__version__),
        tokens=tokens.numpy(),
        upstream=upstream.numpy(),
        result=result.detach().numpy(),
        largest=np.array(bitsandbytes.nn.StableEmbedding(*WIDE).weight.abs().max().item()),
        state_bytes=np.array(optimizer.state[wide.weight]["state1"].element_size()),
        **{
            f"at_{name}": parameter.detach().numpy()
            for name, parameter in embedding.named_parameters()
        },
        **{
            f"grad_{name}": parameter.grad.numpy()
            for name, parameter in embedding.named_parameters()
        },
    )
