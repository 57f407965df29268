"""One layer of Transformer-XL (Dai et al. 2019, arXiv 1901.02860) by itself, and its memory.

A stack's layers are the same :class:`~memspan.models.relative.self_attention.RelativeLayer`, whose
biases, position codes and mask the stack has for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.models.relative.self_attention import AttentionAlone, RelativeLayer, newest
from memspan.trees import LayerMemory, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.transformer_xl.config import TransformerXLConfig


@dataclass(frozen=True, repr=False)
class TransformerXLLayerMemory(LayerMemory):
    """The last ``M`` inputs of one layer, newest right-most."""

    hidden: Tensor
    """``[B, M, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""


class TransformerXLAttention(AttentionAlone):
    """Attention over the last inputs and a segment, without a residual or a norm.

    Args:
        config: its width, heads, memory, span and positions; what concerns other parts of a model, such
            as ``n_layers``, is not looked at.
    """

    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        check_config(self, config, "TransformerXLConfig")
        super().__init__(config)

    def initial_memory(self, batch_size: int) -> TransformerXLLayerMemory:
        """A memory before the first token, of ``config.memory_length`` slots."""
        config, weight = self.config, self.content_bias
        hidden = weight.new_zeros(batch_size, config.memory_length, config.d_model)
        used = config.memory_length * (config.start == "zeros")
        length = weight.new_full((batch_size,), used, dtype=torch.long)
        return TransformerXLLayerMemory(hidden, length)

    def forward(
        self,
        x: Tensor,
        memory: TransformerXLLayerMemory | None = None,
        implementation: str | None = None,
        norm: nn.Module | None = None,
    ) -> tuple[Tensor, TransformerXLLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment.

        ``implementation``: see :func:`memspan.ops.relative_attention`. ``norm``: applied to ``x`` and
        to memory, which holds ``x`` as it is (None: nothing).

        Raises:
            MemspanError: shapes, types or devices do not go together; a learned position table is too
                short.
        """
        memory = check_layer(self, x, self.config.d_model, memory)
        old, length = memory.hidden.to(x.dtype), memory.length
        y, _ = self.read(x, old, length, norm, implementation)
        length = (length + x.shape[1]).clamp(max=old.shape[1])
        return y, TransformerXLLayerMemory(newest(old, x), length)


class TransformerXLLayer(RelativeLayer):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate.

    Args:
        config: as of :class:`TransformerXLAttention`, and the feed-forward's width, norms, gates and
            dropout.
    """

    attention: TransformerXLAttention
    attention_type = TransformerXLAttention

    def __init__(self, config: TransformerXLConfig) -> None:
        check_config(self, config, "TransformerXLConfig")
        super().__init__(config, config.norm_epsilon)

    def initial_memory(self, batch_size: int) -> TransformerXLLayerMemory:
        """A memory before the first token, of ``config.memory_length`` slots."""
        return self.attention.initial_memory(batch_size)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: TransformerXLLayerMemory | None = None,
        implementation: str | None = None,
    ) -> tuple[Tensor, TransformerXLLayerMemory]:
        """Read a segment: see :meth:`TransformerXLAttention.forward`."""
        attended, memory = self.attention(x, memory, implementation, self.input_norm)
        return self.residual(x, attended), memory
