"""One transformer block: attention and MLP, each behind a LayerNorm, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from trainer.config import ModelSection
from trainer.mesh import Mesh
from trainer.model.attention import SelfAttention
from trainer.model.documents import Stream, hidden_of, joined
from trainer.model.initial import output_projection_std
from trainer.model.kernels import Kernel
from trainer.model.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from trainer.model.positions import Rotary
from trainer.model.recompute_choice import Recomputed

GELU_FORMS = {"gelu_tanh": "tanh", "gelu": "none"}


class MultilayerPerceptron(nn.Module):
    """hidden -> ffn -> hidden with GELU: its tanh approximation (as BLOOM was trained), or the exact one."""

    def __init__(self, model: ModelSection, mesh: Mesh):
        super().__init__()
        std = model.init_std
        self.approximate = GELU_FORMS[model.activation]
        self.up = ColumnParallelLinear(model.hidden_size, model.ffn, std, mesh)
        self.down = RowParallelLinear(model.ffn, model.hidden_size, output_projection_std(std, model.layers), mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden), approximate=self.approximate))


class TransformerBlock(nn.Module):
    """Pre-layer-norm block on [batch, sequence, hidden]. Its name is what `type:transformer` partitions by.

    `recomputed`: what the backward pass computes again; of a whole block the engine takes care.
    """

    def __init__(
        self,
        model: ModelSection,
        mesh: Mesh,
        kernel: Kernel,
        rotary: Rotary | None,
        recomputed: Recomputed = "nothing",
    ):
        super().__init__()
        self.recomputed = recomputed
        self.dropout = model.hidden_dropout
        self.input_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.attention = SelfAttention(model, mesh, kernel, rotary, recomputed == "attention")
        self.post_attention_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.mlp = MultilayerPerceptron(model, mesh)

    def forward(self, stream: Stream) -> Stream:
        hidden, documents = hidden_of(stream)
        hidden = hidden + self._drop(self.attention(self.input_norm(hidden), documents))
        hidden = hidden + self._drop(self.mlp(self.post_attention_norm(hidden)))
        return joined(hidden, documents)

    def _drop(self, branch: Tensor) -> Tensor:
        return functional.dropout(branch, self.dropout, self.training) if self.dropout > 0.0 else branch
