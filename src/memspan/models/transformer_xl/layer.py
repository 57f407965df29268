"""One layer of Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its attention, and its memory.

A layer's memory ``m`` is its last ``M`` inputs. From a segment's inputs ``x`` it computes (sections
3.2 and 3.3)::

    c = [m ; x]                                           memory, then the segment
    q, k, v = W_q x, W_k c, W_v c
    A_ij = ( (q_i + u) . k_j + (q_i + v) . W_R r_(i-j) ) / sqrt(K)
    y = W_o softmax_j(A) v
    m' = the last M columns of c

where ``r_d`` is the sinusoid of the distance ``d``, and ``j`` is no later than ``i``. With pre-norm,
``q``, ``k`` and ``v`` are made of the normalised ``x`` and ``c``. Scores and their options:
:mod:`memspan.models.relative.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memspan.models.known import known
from memspan.models.relative.attention import AttentionPass, RelativeAttention, RelativeLayer
from memspan.nn import count_after, newest, where_in_use
from memspan.trees import LayerMemory, check_config, check_layer, zeros_for

if TYPE_CHECKING:
    from memspan.models.transformer_xl.config import TransformerXLConfig


@dataclass(frozen=True, repr=False)
class TransformerXLLayerMemory(LayerMemory):
    """The last ``M`` inputs of one layer, newest right-most."""

    hidden: Tensor
    """``[B, M, D]``; empty slots are zero."""
    length: Tensor
    """Valid slots per row, int64 ``[B]``, counted from the right."""


@known("config", "n_heads", "head_width")
class TransformerXLAttention(RelativeAttention):
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
        config = self.config
        weight = self.content_bias
        hidden = zeros_for(weight, batch_size, config.memory_length, config.d_model)
        used = config.memory_length * (config.start == "zeros")
        length = zeros_for(weight, batch_size, dtype=torch.long) + used
        return TransformerXLLayerMemory(hidden, length)

    def forward(
        self,
        x: Tensor,
        memory: TransformerXLLayerMemory | None = None,
        implementation: str | None = None,
        norm: nn.Module | None = None,
        shared: AttentionPass | None = None,
    ) -> tuple[Tensor, TransformerXLLayerMemory]:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed: the
        output ``[B, T, D]``, and the memory after the segment.

        Args:
            implementation: see :func:`memspan.ops.relative_attention`.
            norm: applied to ``x`` and to memory, which holds ``x`` as it is (None: nothing).
            shared: from a stack, which has checked ``x`` and ``memory``; it names the implementation.

        Raises:
            MemspanError: shapes, types or devices do not go together; a learned position table is too
                short.
        """
        if memory is None or shared is None:
            memory = check_layer(self, x, self.config.d_model, memory)
        n_tokens = x.shape[1]
        slots = memory.hidden.shape[1]
        if shared is None:
            shared = self.pass_alone(n_tokens, slots, memory.length, implementation)
        old = memory.hidden.to(x.dtype)
        q, k, v = self.project(x, old, norm)
        y = self.attend(q, k, v, shared)
        hidden = newest(old, x, shared.documents)
        length = count_after(memory.length, n_tokens, shared.documents).clamp(max=slots)
        if shared.documents is not None:
            # An earlier document is forgotten.
            hidden = where_in_use(hidden, length)
        return y, TransformerXLLayerMemory(hidden, length)


@known("pre")
class TransformerXLLayer(RelativeLayer):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate.

    Args:
        config: as of :class:`TransformerXLAttention`, and the feed-forward's width, norms, gates and
            dropout.
    """

    attention: TransformerXLAttention

    def __init__(self, config: TransformerXLConfig) -> None:
        check_config(self, config, "TransformerXLConfig")
        super().__init__(config, TransformerXLAttention(config), config.norm_epsilon)

    def initial_memory(self, batch_size: int) -> TransformerXLLayerMemory:
        """A memory before the first token, of ``config.memory_length`` slots."""
        return self.attention.initial_memory(batch_size)

    def forward(
        self,
        x: Tensor,
        memory: TransformerXLLayerMemory | None = None,
        implementation: str | None = None,
        shared: AttentionPass | None = None,
    ) -> tuple[Tensor, TransformerXLLayerMemory]:
        """Read a segment: see :meth:`TransformerXLAttention.forward`."""
        y, memory = self.attention(x, memory, implementation, self.input_norm, shared)
        return self.residual(x, y), memory
