"""One layer of the Compressive Transformer (Rae et al. 2019, arXiv 1911.05507): what it does to its
slots, and the layer by itself, with its memory.

Layout, compression functions and losses: :mod:`memspan.models.compressive.compression`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from memspan.errors import MemspanError
from memspan.models.compressive import compression as ops
from memspan.models.relative.self_attention import (
    AttentionAlone,
    RelativeLayer,
    RelativeSelfAttention,
    newest,
)
from memspan.nn import in_use, known, where_in_use
from memspan.trees import LayerMemory, check_config, check_layer

if TYPE_CHECKING:
    from memspan.models.compressive.config import CompressiveConfig
    from memspan.models.compressive.model import CompressiveMemory
    from memspan.models.segments import Documents


@known("kind", "rate")
class Compression(nn.Module):
    """A layer's compression function ``f_c`` and, for auto-encoding, its decoder ``g``."""

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__()
        self.kind, self.rate = config.compression, config.compression_rate
        d_model = config.d_model
        if self.kind == "convolution":
            self.weight = nn.Parameter(torch.empty(d_model, d_model, self.rate))
            self.bias = nn.Parameter(torch.empty(d_model))
        elif self.kind == "dilated-convolution":
            levels = math.ceil(math.log2(self.rate))
            self.weight = nn.Parameter(torch.empty(levels, d_model, d_model, 2))
            self.bias = nn.Parameter(torch.empty(levels, d_model))
        if config.auxiliary_loss == "auto-encoding":
            self.decoder_weight = nn.Parameter(torch.empty(d_model, d_model, self.rate))
            self.decoder_bias = nn.Parameter(torch.empty(d_model))

    def forward(self, x: Tensor, received: Tensor | None) -> Tensor:
        """``[B, n*c, D] -> [B, n, D]``; ``received [B, n*c]`` is the attention, for most-used."""
        if self.kind == "mean":
            return ops.mean_pooling(x, self.rate)
        if self.kind == "max":
            return ops.max_pooling(x, self.rate)
        if self.kind == "convolution":
            return ops.convolution(x, self.weight, self.bias)
        if self.kind == "dilated-convolution":
            return ops.dilated_convolution(x, self.weight, self.bias, self.rate)
        if received is None:
            raise MemspanError(
                "most-used needs the attention that each slot received: pass received"
            )
        return ops.most_used(x, received, self.rate)

    def initialise(self) -> None:
        """Begin as mean pooling with some noise, the decoder as repetition: slots keep their scale."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
                share = 1.0 if name == "decoder_weight" else 1 / parameter.shape[-1]
                with torch.no_grad():
                    parameter.add_(torch.eye(parameter.shape[-2])[..., None], alpha=share)


@dataclass(frozen=True)
class Step:
    """What one pass does to the slots, the same for all layers."""

    after: ops.Append
    sources: Tensor
    """Columns of ``[compressed | memory | segment]`` that are compressed, int64 ``[B, n*c]``."""
    valid: Tensor
    """Bool ``[B, n]``: the runs that a row really compresses, ``n`` being the most of any row."""
    kept: Tensor
    """Columns of ``[compressed | new]`` that the compressed memory keeps, int64 ``[B, C]``; those of
    slots that a row does not have may be any."""
    documents: Documents | None

    @classmethod
    def of(
        cls,
        memory: CompressiveMemory | CompressiveLayerMemory,
        n_tokens: int,
        rate: int,
        documents: Documents | None = None,
    ) -> Step:
        """What a segment of ``n_tokens`` does to the slots of ``memory``; ``rate``: c."""
        slots, compressed_slots = memory.hidden.shape[-2], memory.compressed.shape[-2]
        length, compressed_length = memory.length, memory.compressed_length
        added: int | Tensor = n_tokens
        end: int | Tensor = compressed_slots + slots + n_tokens
        if documents is not None:
            length = documents.unless_fresh(length)
            compressed_length = documents.unless_fresh(compressed_length)
            added, end = documents.n_last, compressed_slots + slots + documents.lengths
        after = ops.append(length, compressed_length, added, slots, compressed_slots, rate)
        # As many runs as any phase can ask for: sizes do not depend on the counts.
        runs = -(-n_tokens // rate)
        back = torch.arange(runs * rate, 0, -1, device=length.device)
        return cls(
            after,
            sources=((end - after.length)[:, None] - back).clamp(min=0),
            valid=in_use(runs, after.n_compressed),
            kept=ops.newest(
                compressed_slots, compressed_slots + runs, after.n_compressed, compressed_slots
            ),
            documents=documents,
        )


def compress(
    config: CompressiveConfig,
    compression: Compression | None,
    attention: RelativeSelfAttention,
    norm: nn.Module | None,
    context: Tensor,
    compressed: Tensor,
    step: Step,
    projected: tuple[Tensor, Tensor, Tensor],
    received: Tensor | None,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    """Compress what leaves one layer's memory: the new compressed memory and the auxiliary loss.

    ``context``: both memories and the segment, ``[B, C+M+T, D]``. ``projected``: the segment's queries,
    keys and values of ``context``. ``received``: the attention that each slot received.
    """
    loss = context.new_zeros(())
    if compression is None or not compressed.shape[1] or not step.valid.shape[1]:
        return compressed, loss
    # Detached: neither loss goes through what is compressed to what computed it.
    old = ops.pick(context.detach(), step.sources)
    new = compression(old, None if received is None else ops.pick(received, step.sources))
    if config.auxiliary_loss == "attention":
        q, k, v = (t.detach() for t in projected)
        loss = ops.attention_reconstruction(
            q,
            _pick_heads(k, step.sources),
            _pick_heads(v, step.sources),
            *frozen_keys_and_values(attention, norm, new),
            step.valid,
            None if step.documents is None else step.documents.last(),
            implementation=implementation,
        )
    elif config.auxiliary_loss == "auto-encoding":
        decoder = compression.decoder_weight, compression.decoder_bias
        loss = ops.auto_encoding(old, new, *decoder, step.valid)
    new = new if config.task_gradient else new.detach()
    return ops.pick(torch.cat([compressed, new], 1), step.kept), loss


def frozen_keys_and_values(
    attention: RelativeSelfAttention, norm: nn.Module | None, compressed: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of ``[B, n, D]`` after ``norm``, per head; the weights get no gradient."""
    if norm is not None:
        compressed = _frozen(norm, compressed)
    keys = attention.heads(_frozen(attention.key, compressed))
    return keys, attention.heads(_frozen(attention.value, compressed))


def _frozen(part: nn.Module, x: Tensor) -> Tensor:
    """``part(x)``, without a gradient for its parameters."""
    parameters = {name: parameter.detach() for name, parameter in part.named_parameters()}
    output: Tensor = functional_call(part, parameters, (x,))
    return output


def in_one_row(memory: CompressiveMemory | CompressiveLayerMemory) -> Tensor:
    """``[compressed | memory]`` without a gap before memory that is not full: ``[B, (L,) C+M, D]``."""
    both = torch.cat([memory.compressed, memory.hidden], -2)
    width, n_layers = both.shape[-2], both.shape[1:-2].numel()
    columns = ops.newest(width, width, memory.length, memory.compressed.shape[-2])
    return ops.pick(both.flatten(0, -3), columns.repeat_interleave(n_layers, 0)).view_as(both)


def _pick_heads(x: Tensor, columns: Tensor) -> Tensor:
    """:func:`ops.pick` from ``[B, H, S, K]``, the same columns for all heads."""
    return ops.pick(x.transpose(1, 2), columns).transpose(1, 2)


# ----- By itself


@dataclass(frozen=True, repr=False)
class CompressiveLayerMemory(LayerMemory):
    """Inputs of one layer, newest right-most: the last ones as they were, older ones compressed."""

    hidden: Tensor
    """``[B, M, D]``; empty slots are zero."""
    compressed: Tensor
    """``[B, C, D]``; each slot stands for c tokens."""
    length: Tensor
    """Valid slots of ``hidden``, int64 ``[B]``, counted from the right."""
    compressed_length: Tensor
    """Valid slots of ``compressed``, likewise."""


class CompressiveLayerOutput(NamedTuple):
    """What a Compressive Transformer's layer returns: ``y, memory, auxiliary_loss``."""

    y: Tensor
    """``[B, T, D]``."""
    memory: CompressiveLayerMemory
    """After the segment."""
    auxiliary_loss: Tensor
    """A scalar to add to the task's loss: it trains the compression and nothing else."""


class CompressiveAttention(AttentionAlone):
    """Attention over both memories and a segment, and the compression, without a residual or a norm.

    Args:
        config: its width, heads, memories, compression, span and positions; what concerns other parts
            of a model, such as ``n_layers``, is not looked at.
    """

    config: CompressiveConfig

    def __init__(self, config: CompressiveConfig) -> None:
        check_config(self, config, "CompressiveConfig")
        super().__init__(config)
        self.compression = None
        if config.compressed_length:
            self.compression = Compression(config)
            self.compression.initialise()

    def initial_memory(self, batch_size: int) -> CompressiveLayerMemory:
        """A memory before the first token, of ``config.memory_length`` slots and
        ``config.compressed_length`` compressed ones."""
        config, weight = self.config, self.content_bias
        hidden, compressed = (
            weight.new_zeros(batch_size, slots, config.d_model)
            for slots in (config.memory_length, config.compressed_length)
        )
        length = weight.new_zeros(batch_size, dtype=torch.long)
        return CompressiveLayerMemory(hidden, compressed, length, length)

    def forward(
        self,
        x: Tensor,
        memory: CompressiveLayerMemory | None = None,
        implementation: str | None = None,
        norm: nn.Module | None = None,
    ) -> CompressiveLayerOutput:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed.

        ``implementation``: see :func:`memspan.ops.relative_attention`. ``norm``: applied to ``x`` and
        to memory, which holds ``x`` as it is (None: nothing).

        Raises:
            MemspanError: shapes, types or devices do not go together; a learned position table is too
                short.
        """
        config = self.config
        memory = check_layer(self, x, config.d_model, memory)
        step = Step.of(memory, x.shape[1], config.compression_rate)
        old = in_one_row(memory).to(x.dtype)
        context, received = torch.cat([old, x], 1), None
        if config.needs_received:
            received = x.new_zeros(context.shape[:2])
        used = memory.length + memory.compressed_length
        y, projected = self.read(x, old, used, norm, implementation, received)
        compressed, loss = compress(
            config,
            self.compression,
            self,
            norm,
            context,
            memory.compressed.to(x.dtype),
            step,
            projected,
            received,
            implementation,
        )
        length, compressed_length = step.after.length, step.after.compressed_length
        after = CompressiveLayerMemory(
            where_in_use(newest(memory.hidden.to(x.dtype), x), length),
            where_in_use(compressed, compressed_length),
            length,
            compressed_length,
        )
        return CompressiveLayerOutput(y, after, loss)


class CompressiveLayer(RelativeLayer):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate.

    Args:
        config: as of :class:`CompressiveAttention`, and the feed-forward's width, norms, gates and
            dropout.
    """

    attention: CompressiveAttention
    attention_type = CompressiveAttention

    def __init__(self, config: CompressiveConfig) -> None:
        check_config(self, config, "CompressiveConfig")
        super().__init__(config)

    def initial_memory(self, batch_size: int) -> CompressiveLayerMemory:
        return self.attention.initial_memory(batch_size)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        memory: CompressiveLayerMemory | None = None,
        implementation: str | None = None,
    ) -> CompressiveLayerOutput:
        """Read a segment: see :meth:`CompressiveAttention.forward`."""
        attended, memory, loss = self.attention(x, memory, implementation, self.input_norm)
        return CompressiveLayerOutput(self.residual(x, attended), memory, loss)
