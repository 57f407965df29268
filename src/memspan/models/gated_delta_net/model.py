"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464): memory, layer and stack.

Every head of values has a matrix that each token first decays, then writes to and reads from
(eq. 10); these matrices, and the last inputs of the convolutions, are the memory. Options:
:class:`memspan.models.GatedDeltaNetConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.in_place import FinitePassReader
from memspan.models.initialisation import initialise
from memspan.models.output import BackboneOutput
from memspan.models.packing import (
    Schema,
    dropout,
    feed_forward,
    known,
    layer_norm,
    linear,
    module_list,
)
from memspan.models.protocol import Backbone, BackboneReader
from memspan.models.segments import Padding, read_in_pieces
from memspan.nn import FeedForward, dropout_layer
from memspan.ops.convolution import short_convolution
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.inputs import Chunking
from memspan.ops.fast_weights.rules import IMPLEMENTATIONS, delta_rule
from memspan.ops.implementations import refuse_unknown_implementation

EPSILON = 1e-6
"""Inside the roots that normalise queries, keys and outputs."""
PRODUCTS = ("query", "key", "value", "output_gate", "beta", "step")
"""Of the input, in the order in which a reader has their weights as one matrix."""
SLOWEST, FASTEST = 1e-3, 1e-1
"""Range of softplus(dt_bias) at initialisation, log-uniform, as in Mamba (arXiv 2312.00752)."""


@dataclass(frozen=True, repr=False)
class GatedDeltaNetMemory(Memory):
    """The matrices of every layer and head and the last inputs of the convolutions, in float32 or
    better."""

    weights: Tensor
    """``[B, L, H, K, V]``: keys by values, the paper's S transposed."""
    inputs: Tensor
    """Before the convolutions, oldest first: queries, keys and values side by side,
    ``[B, L, W - 1, C]``."""


@known
class GatedDeltaRule(nn.Module):
    """One layer's token mixing (section 3.4 and figure 1 of the paper)."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        d, heads = config.d_model, config.value_heads
        queries, keys, values = config.widths
        self.query = nn.Linear(d, queries, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, values, bias=False)
        self.convolution = nn.Parameter(torch.empty(sum(config.widths), config.convolution))
        self.beta = nn.Linear(d, heads, bias=False)
        self.step = nn.Linear(d, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log_())
        steps = torch.empty(heads).uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
        # softplus(dt_bias) is that.
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        self.output_gate = nn.Linear(d, values, bias=False)
        self.norm = nn.RMSNorm(config.value_width, eps=EPSILON)
        self.output = nn.Linear(values, d, bias=False)

    def forward(
        self, x: Tensor, weights: Tensor, inputs: Tensor, implementation: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read a segment.

        Args:
            x: ``[B, T, D]``.
            weights: the matrices before it, ``[B, H, K, V]``.
            inputs: the convolutions' last inputs before it, ``[B, W - 1, C]``.
            implementation: see :func:`memspan.ops.fast_weights.rules.delta_rule`.

        Returns:
            The output ``[B, T, D]``, and matrices and inputs after the segment.
        """
        mixed = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        beta, step, gate = self.beta(x), self.step(x), self.output_gate(x)
        # Sums over thousands of tokens need float32, whatever precision the products have. fla's
        # kernels add up in float32 themselves, and take what they multiply as it is.
        with torch.autocast(x.device.type, enabled=False):
            if implementation != "fla":
                mixed, beta = mixed.to(weights.dtype), beta.to(weights.dtype)
            step, gate = step.to(weights.dtype), gate.to(weights.dtype)
            y, weights, inputs = self.write_and_read(
                mixed, beta, step, weights, inputs, implementation
            )
            y = self.norm(y.to(weights.dtype)) * F.silu(gate.unflatten(-1, y.shape[2:]))
        return self.output(y.flatten(2).to(x.dtype)), weights, inputs

    def write_and_read(
        self,
        mixed: Tensor,
        beta: Tensor,
        step: Tensor,
        weights: Tensor,
        inputs: Tensor,
        implementation: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The recurrence over a segment, from the projections: queries, keys and values side by side,
        ``[B, T, C]``, and two logits per head, ``[B, T, H]``.

        Returns ``y [B, T, H, V]``, and matrices and inputs after the segment.
        """
        config = self.config
        mixed, after = short_convolution(
            mixed,
            self.convolution.to(mixed.dtype),
            inputs.to(mixed.dtype),
            implementation="reference" if implementation == "reference" else None,
        )
        inputs = after.to(inputs.dtype)
        beta = beta.sigmoid() * (2 if config.negative_eigenvalues else 1)
        q, k, v = F.silu(mixed).split(config.widths, -1)
        q, k = (unit(t.unflatten(-1, (config.n_heads, -1))) for t in (q, k))
        v = v.unflatten(-1, (config.value_heads, -1))
        log_decay = -self.A_log.to(step.dtype).exp() * F.softplus(step + self.dt_bias)
        y, weights = delta_rule(
            q.transpose(1, 2) * config.head_width**-0.5,
            k.transpose(1, 2),
            v.transpose(1, 2),
            beta.transpose(1, 2),
            weights,
            log_decay=log_decay.transpose(1, 2),
            chunking=Chunking(config.chunk_size, config.recompute and torch.is_grad_enabled()),
            implementation=implementation,
        )
        return y.transpose(1, 2), weights, inputs


def unit(x: Tensor) -> Tensor:
    """``x [..., K]`` divided by its length; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


@known
class GatedDeltaNetLayer(nn.Module):
    """Token mixing and a feed-forward sub-layer, each after a norm and with a residual."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.mixer = GatedDeltaRule(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.mixer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def forward(
        self, x: Tensor, weights: Tensor, inputs: Tensor, implementation: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read a segment: arguments and results as in :meth:`GatedDeltaRule.forward`."""
        mixed, weights, inputs = self.mixer(self.mixer_norm(x), weights, inputs, implementation)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), weights, inputs


@known
class GatedDeltaNet(Backbone[GatedDeltaNetMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments.
    """

    memory_type = GatedDeltaNetMemory
    implementations = tuple(IMPLEMENTATIONS)
    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(GatedDeltaNetLayer(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.d_model)
        kept = [
            (p, p.detach().clone()) for n, p in self.named_parameters() if n.endswith("dt_bias")
        ]
        initialise(self, config.initialisation, config.n_layers)
        with torch.no_grad():
            # No bias of a product: zeros would forget within a few tokens.
            for parameter, value in kept:
                parameter.copy_(value)
        self.schema = _schema(config)

    def stack(self) -> Iterator[GatedDeltaNetLayer]:
        """The layers, first to last, as :class:`GatedDeltaNetLayer`."""
        return iter(self.layers)  # type: ignore[arg-type]

    def row_sizes(self) -> Mapping[str, tuple[int | None, ...]]:
        """See :meth:`Backbone.row_sizes`."""
        config = self.config
        matrix = (config.value_heads, config.head_width, config.value_width)
        return {
            "weights": (config.n_layers, *matrix),
            "inputs": (config.n_layers, config.convolution - 1, sum(config.widths)),
        }

    def initial_memory(self, batch_size: int) -> GatedDeltaNetMemory:
        """A memory before the first token, in float32 or better."""
        weight = next(self.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        fields = {
            name: weight.new_zeros(batch_size, *size, dtype=dtype)  # type: ignore[arg-type]
            for name, size in self.row_sizes().items()
        }
        return GatedDeltaNetMemory(weight.new_zeros(batch_size, dtype=torch.long), **fields)

    def forward(
        self,
        x: Tensor,
        memory: GatedDeltaNetMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[GatedDeltaNetMemory]:
        """Read a segment, see :meth:`memspan.models.Backbone.forward`.

        ``implementation``: of :func:`memspan.ops.fast_weights.rules.delta_rule` (None: the fastest that
        can run here); ``reference`` takes the convolution's, too.
        """
        refuse_unknown_implementation(implementation, self.implementations)
        memory = self.initial_memory(len(x)) if memory is None else memory
        if not x.shape[1]:
            return BackboneOutput(self.final_norm(x), memory, x.new_zeros(()))
        read = partial(self._read, implementation=implementation)
        if starts is None and lengths is None:
            return read(x, memory)
        return read_in_pieces(read, x, memory, starts, lengths, padding)

    def _read(
        self, x: Tensor, memory: GatedDeltaNetMemory, implementation: str | None
    ) -> BackboneOutput[GatedDeltaNetMemory]:
        """Read a segment in which no document begins and no row is padded."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        h, after = self.dropout(x), []
        before = zip(memory.weights.unbind(1), memory.inputs.unbind(1), strict=True)
        for layer, (weights, inputs) in zip(self.stack(), before, strict=True):
            given = (h, weights.to(dtype), inputs.to(dtype), implementation)
            h, *own = self.through(layer, *given)
            after.append(own)
        weights, inputs = (torch.stack(own, 1) for own in zip(*after, strict=True))
        memory = GatedDeltaNetMemory(memory.tokens_seen + x.shape[1], weights, inputs)
        return BackboneOutput(self.final_norm(h), memory, h.new_zeros(()))

    def reader(
        self, memory: GatedDeltaNetMemory | None, batch_size: int
    ) -> BackboneReader[GatedDeltaNetMemory]:
        """A reader with constant memory and time per token."""
        from memspan.models.gated_delta_net.reader import GatedDeltaNetReader

        kind = GatedDeltaNetReader if self.is_as_made() else FinitePassReader
        return kind(self, self.own_memory(memory, batch_size))

    def compiled_loops(self) -> bool:
        """Whether the chunks in C can run here."""
        return delta_rule_loop.available(next(self.parameters()))

    def float32_part(self) -> str:
        """All between the products, see :meth:`Backbone.float32_part`."""
        return "matrices are decayed, written and read"


def _schema(config: GatedDeltaNetConfig) -> Schema:
    d, heads = config.d_model, config.value_heads
    queries, keys, values = config.widths
    outputs = (queries, keys, values, values, heads, heads)
    products = {
        name: linear(d, width, bias=False) for name, width in zip(PRODUCTS, outputs, strict=True)
    }
    gain = {"weight": (config.value_width,)}
    known_norm = {"eps": EPSILON, "normalized_shape": (config.value_width,)}
    mixer = Schema(
        GatedDeltaRule,
        {
            "convolution": (sum(config.widths), config.convolution),
            "A_log": (heads,),
            "dt_bias": (heads,),
        },
        {"config": config},
        products
        | {
            "norm": Schema(nn.RMSNorm, gain, known_norm),
            "output": linear(values, d, bias=False),
        },
    )
    layer = Schema(
        GatedDeltaNetLayer,
        modules={
            "mixer": mixer,
            "feed_forward": feed_forward(d, config.d_ff, config.activation, config.dropout),
            "mixer_norm": layer_norm(d),
            "feed_forward_norm": layer_norm(d),
            "dropout": dropout(config.dropout),
        },
    )
    return Schema(
        GatedDeltaNet,
        attributes={"config": config},
        modules={
            "dropout": dropout(config.dropout),
            "layers": module_list([layer] * config.n_layers),
            "final_norm": layer_norm(d),
        },
    )
