"""One transformer block: attention and MLP, each behind a LayerNorm, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from trainer.config import ModelSection
from trainer.mesh import Mesh
from trainer.model.attention import AttentionBias, SelfAttention
from trainer.model.initial import output_projection_std
from trainer.model.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear


class MultilayerPerceptron(nn.Module):
    """hidden -> ffn -> hidden with the tanh approximation of GELU."""

    def __init__(self, model: ModelSection, mesh: Mesh):
        super().__init__()
        std = model.init_std
        self.up = ColumnParallelLinear(model.hidden_size, model.ffn, std, mesh)
        self.down = RowParallelLinear(model.ffn, model.hidden_size, output_projection_std(std, model.layers), mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(hidden), approximate="tanh"))


class TransformerBlock(nn.Module):
    """Pre-layer-norm block on [batch, sequence, hidden]. Its name is what `type:transformer` partitions by."""

    def __init__(self, model: ModelSection, mesh: Mesh, bias: AttentionBias | None):
        super().__init__()
        self.dropout = model.hidden_dropout
        self.input_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.attention = SelfAttention(model, mesh, bias)
        self.post_attention_norm = LayerNorm(model.hidden_size, model.layernorm_epsilon, mesh)
        self.mlp = MultilayerPerceptron(model, mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._drop(self.attention(self.input_norm(hidden)))
        return hidden + self._drop(self.mlp(self.post_attention_norm(hidden)))

    def _drop(self, branch: Tensor) -> Tensor:
        return functional.dropout(branch, self.dropout, self.training) if self.dropout > 0.0 else branch
