"""One layer of the Compressive Transformer (Rae et al. 2019, arXiv 1911.05507): its attention, its
memories, and the compression from one into the other.

A layer keeps its last ``M`` inputs ``m`` and older ones compressed, ``cm``. From a segment's inputs
``x`` it computes (algorithm 1)::

    y = attention(x, [cm ; m ; x])                        as in Transformer-XL
    old = what no longer fits into [m ; x]                runs of c slots, oldest first
    new = f_c(old)                                        a slot for each run
    m', cm' = the rest of [m ; x], the last C columns of [cm ; new]

``f_c`` is trained by an auxiliary loss alone: attention over ``old`` and over ``new`` should be the
same (algorithm 2), or a decoder should find ``old`` in ``new``. Layout, compression functions and
losses: :mod:`memspan.models.compressive.compression`. Scores:
:mod:`memspan.models.relative.attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memspan.errors import MemspanError
from memspan.models.compressive import compression as ops
from memspan.models.known import known
from memspan.models.relative.attention import AttentionPass, RelativeAttention, RelativeLayer
from memspan.nn import in_use, newest, where_in_use
from memspan.trees import LayerMemory, check_config, check_layer, zeros_for

if TYPE_CHECKING:
    from memspan.models.compressive.config import CompressiveConfig
    from memspan.models.compressive.model import CompressiveMemory
    from memspan.models.segments import Documents


@known("kind", "rate")
class Compression(nn.Module):
    """A layer's compression function ``f_c`` and, for auto-encoding, its decoder ``g``."""

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__()
        self.kind = config.compression
        self.rate = config.compression_rate
        d_model = config.d_model
        if self.kind == "convolution":
            self.weight = nn.Parameter(torch.zeros(d_model, d_model, self.rate))
            self.bias = nn.Parameter(torch.zeros(d_model))
        elif self.kind == "dilated-convolution":
            levels = math.ceil(math.log2(self.rate))
            self.weight = nn.Parameter(torch.zeros(levels, d_model, d_model, 2))
            self.bias = nn.Parameter(torch.zeros(levels, d_model))
        if config.auxiliary_loss == "auto-encoding":
            self.decoder_weight = nn.Parameter(torch.zeros(d_model, d_model, self.rate))
            self.decoder_bias = nn.Parameter(torch.zeros(d_model))
        # Whole models add noise to it.
        self.initialise(0.0)

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

    def initialise(self, noise: float = 0.02) -> None:
        """Begin as mean pooling with some ``noise``, the decoder as repetition: slots keep their
        scale."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            nn.init.zeros_(parameter)
            if "bias" not in name:
                if noise:
                    nn.init.normal_(parameter, std=noise)
                share = 1.0 if name == "decoder_weight" else 1 / parameter.shape[-1]
                with torch.no_grad():
                    parameter.add_(torch.eye(parameter.shape[-2])[..., None], alpha=share)


@dataclass(frozen=True)
class Step:
    """A segment's effect on the slots, the same for all layers."""

    after: ops.Append
    in_one_row: Tensor
    """Columns of ``[compressed | memory]`` that leave no gap before memory that is not full, int64
    ``[B, C+M]``."""
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
        """The effect of ``n_tokens`` on the slots of ``memory``; ``rate``: c."""
        slots = memory.hidden.shape[-2]
        compressed_slots = memory.compressed.shape[-2]
        length = memory.length
        compressed_length = memory.compressed_length
        added: int | Tensor = n_tokens
        end: int | Tensor = compressed_slots + slots + n_tokens
        if documents is not None:
            length = documents.unless_fresh(length)
            compressed_length = documents.unless_fresh(compressed_length)
            added = documents.n_last
            end = compressed_slots + slots + documents.lengths
        after = ops.append(length, compressed_length, added, slots, compressed_slots, rate)
        # As many runs as any phase can ask for: sizes do not depend on the counts.
        runs = -(-n_tokens // rate)
        back = torch.arange(runs * rate, 0, -1, device=length.device)
        return cls(
            after,
            in_one_row=_in_one_row(memory),
            sources=((end - after.length)[:, None] - back).clamp(min=0),
            valid=in_use(runs, after.n_compressed),
            kept=ops.newest(
                compressed_slots, compressed_slots + runs, after.n_compressed, compressed_slots
            ),
            documents=documents,
        )


@dataclass(frozen=True, kw_only=True)
class CompressivePass(AttentionPass):
    """See :class:`AttentionPass`."""

    step: Step
    counts: bool
    """True if each layer is to return the attention that each slot receives."""


def in_one_row(memory: CompressiveMemory) -> Tensor:
    """``[compressed | memory]`` without a gap before memory that is not full: ``[B, L, C+M, D]``."""
    both = torch.cat([memory.compressed, memory.hidden], 2)
    columns = _in_one_row(memory).repeat_interleave(both.shape[1], 0)
    return ops.pick(both.flatten(0, 1), columns).view_as(both)


def _in_one_row(memory: CompressiveMemory | CompressiveLayerMemory) -> Tensor:
    """See :attr:`Step.in_one_row`."""
    compressed_slots = memory.compressed.shape[-2]
    width = compressed_slots + memory.hidden.shape[-2]
    return ops.newest(width, width, memory.length, compressed_slots)


def _pick_heads(x: Tensor, columns: Tensor) -> Tensor:
    """:func:`ops.pick` from ``[B, H, S, K]``, the same columns for all heads."""
    return ops.pick(x.transpose(1, 2), columns).transpose(1, 2)


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
    """Valid slots of ``compressed``, int64 ``[B]``, counted from the right."""


class CompressiveLayerOutput(NamedTuple):
    """A Compressive Transformer layer's output: ``y, memory, auxiliary_loss, received``."""

    y: Tensor
    """``[B, T, D]``."""
    memory: CompressiveLayerMemory
    """After the segment."""
    auxiliary_loss: Tensor
    """A scalar to add to the task's loss: it trains the compression and nothing else."""
    received: Tensor | None
    """The attention that each slot and token received, ``[B, C+M+T]`` (None: nobody asked)."""


@known("config", "n_heads", "head_width")
class CompressiveAttention(RelativeAttention):
    """Attention over both memories and a segment, and the compression, without a residual or a norm.

    Args:
        config: its width, heads, memories, compression, span and positions; what concerns other parts
            of a model, such as ``n_layers``, is not looked at.
    """

    config: CompressiveConfig

    def __init__(self, config: CompressiveConfig) -> None:
        check_config(self, config, "CompressiveConfig")
        super().__init__(config)
        self.compression = Compression(config) if config.compressed_length else None

    def initial_memory(self, batch_size: int) -> CompressiveLayerMemory:
        """A memory before the first token, of ``config.memory_length`` slots and
        ``config.compressed_length`` compressed ones."""
        config = self.config
        weight = self.content_bias
        hidden, compressed = (
            zeros_for(weight, batch_size, slots, config.d_model)
            for slots in (config.memory_length, config.compressed_length)
        )
        length = zeros_for(weight, batch_size, dtype=torch.long)
        return CompressiveLayerMemory(hidden, compressed, length, length)

    def forward(
        self,
        x: Tensor,
        memory: CompressiveLayerMemory | None = None,
        implementation: str | None = None,
        norm: nn.Module | None = None,
        shared: CompressivePass | None = None,
    ) -> CompressiveLayerOutput:
        """Read ``x [B, T, D]`` after ``memory`` (None: nothing was read), which is not changed.

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
        if shared is None:
            shared = self._pass_alone(x.shape[1], memory, implementation)
        step = shared.step
        recent = memory.hidden.to(x.dtype)
        compressed = memory.compressed.to(x.dtype)
        old = ops.pick(torch.cat([compressed, recent], 1), step.in_one_row)
        context = torch.cat([old, x], 1)
        received = x.new_zeros(context.shape[:2]) if shared.counts else None
        q, k, v = self.project(x, old, norm)
        y = self.attend(q, k, v, shared, received)
        loss = x.new_zeros(())
        if self.compression is not None and compressed.shape[1] and step.valid.shape[1]:
            # Detached: neither loss goes through what is compressed to what computed it.
            leaving = ops.pick(context.detach(), step.sources)
            used = None if received is None else ops.pick(received, step.sources)
            new = self.compression(leaving, used)
            loss = self._auxiliary_loss(leaving, new, (q, k, v), norm, shared)
            new = new if self.config.task_gradient else new.detach()
            compressed = ops.pick(torch.cat([compressed, new], 1), step.kept)
        length = step.after.length
        compressed_length = step.after.compressed_length
        after = CompressiveLayerMemory(
            where_in_use(newest(recent, x, shared.documents), length),
            where_in_use(compressed, compressed_length),
            length,
            compressed_length,
        )
        return CompressiveLayerOutput(y, after, loss, received)

    def _pass_alone(
        self, n_tokens: int, memory: CompressiveLayerMemory, implementation: str | None
    ) -> CompressivePass:
        slots = memory.hidden.shape[1] + memory.compressed.shape[1]
        used = memory.length + memory.compressed_length
        attention = self.pass_alone(n_tokens, slots, used, implementation)
        return CompressivePass(
            attention.codes,
            attention.mask,
            implementation,
            step=Step.of(memory, n_tokens, self.config.compression_rate),
            counts=self.config.needs_received,
        )

    def _auxiliary_loss(
        self,
        leaving: Tensor,
        new: Tensor,
        projected: tuple[Tensor, Tensor, Tensor],
        norm: nn.Module | None,
        shared: CompressivePass,
    ) -> Tensor:
        """The loss of slots that are ``leaving [B, n*c, D]`` and become ``new [B, n, D]``, a scalar:
        its gradient reaches the compression alone.

        ``projected``: queries, keys and values of :meth:`project`.
        """
        step = shared.step
        compression = self.compression
        if self.config.auxiliary_loss == "attention":
            q, k, v = (t.detach() for t in projected)
            return ops.attention_reconstruction(
                q,
                _pick_heads(k, step.sources),
                _pick_heads(v, step.sources),
                *self.frozen_keys_and_values(new, norm),
                step.valid,
                None if step.documents is None else step.documents.last(),
                implementation=shared.implementation,
            )
        if self.config.auxiliary_loss == "auto-encoding":
            assert compression is not None
            decoder = compression.decoder_weight, compression.decoder_bias
            return ops.auto_encoding(leaving, new, *decoder, step.valid)
        return leaving.new_zeros(())

    def frozen_keys_and_values(
        self, compressed: Tensor, norm: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of ``[B, n, D]`` after ``norm``, per head; the weights get no gradient."""
        norm = nn.Identity() if norm is None else norm
        with _Frozen(norm, self.key, self.value):
            compressed = norm(compressed)
            keys = self.key(compressed)
            values = self.value(compressed)
        return self.heads(keys), self.heads(values)


@known("pre")
class CompressiveLayer(RelativeLayer):
    """Attention and feed-forward sub-layers, each with its norm and its residual sum or gate.

    Args:
        config: as of :class:`CompressiveAttention`, and the feed-forward's width, norms, gates and
            dropout.
    """

    attention: CompressiveAttention

    def __init__(self, config: CompressiveConfig) -> None:
        check_config(self, config, "CompressiveConfig")
        super().__init__(config, CompressiveAttention(config))

    def initial_memory(self, batch_size: int) -> CompressiveLayerMemory:
        """See :meth:`CompressiveAttention.initial_memory`."""
        return self.attention.initial_memory(batch_size)

    def forward(
        self,
        x: Tensor,
        memory: CompressiveLayerMemory | None = None,
        implementation: str | None = None,
        shared: CompressivePass | None = None,
    ) -> CompressiveLayerOutput:
        """Read a segment: see :meth:`CompressiveAttention.forward`."""
        y, *others = self.attention(x, memory, implementation, self.input_norm, shared)
        return CompressiveLayerOutput(self.residual(x, y), *others)


class _Frozen(TorchFunctionMode):
    """While it is entered, this thread's calls of torch's functions get the parameters of ``parts``
    detached. The modules stay as they are, for other threads too, whatever their ``forward`` is."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.detached = [(p, p.detach()) for part in parts for p in part.parameters()]

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        arguments, options = tree_map(self._instead, (arguments, options or {}))
        return function(*arguments, **options)

    def _instead(self, given: Any) -> Any:
        return next((own for parameter, own in self.detached if parameter is given), given)
