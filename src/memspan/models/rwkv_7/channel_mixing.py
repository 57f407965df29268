"""RWKV-7's feed-forward sub-layer (Peng et al. 2025, arXiv 2503.14456, section 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.models.matrix.mixer import Reading
from memspan.nn import dropout_layer

if TYPE_CHECKING:
    from memspan.models.rwkv_7.config import RWKV7Config


class RWKV7ChannelMixing(nn.Module):
    """The feed-forward sub-layer, ``W_2 f(W_1 (x + (previous x - x) * shift))^2``, with each
    token beside the one before it. Made as :class:`RWKV7TimeMixing` is."""

    def __init__(self, config: RWKV7Config, layer: int = 0) -> None:
        super().__init__()
        ramp = torch.arange(config.d_model) / config.d_model
        self.shift = nn.Parameter(1 - ramp ** (1 - layer / config.n_layers) ** 4)
        self.inner = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.activation = torch.relu if config.activation == "relu" else F.gelu
        self.dropout = dropout_layer(config.dropout)

    def forward(self, x: Tensor, inputs: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        """The output ``[B, T, D]``, and the last token to carry on, after ``inputs [B, 1, D]``."""
        before, carried = reading.shift(x, inputs)
        inner = self.activation(self.inner(torch.lerp(x, before, self.shift)))
        return self.outer(self.dropout(inner.square())), carried
