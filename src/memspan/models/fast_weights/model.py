"""Fast Weights (Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174): memory and stack.

Every head has a matrix that each token writes to and reads from; these matrices are the memory.
Options: :class:`memspan.models.FastWeightsConfig`. One layer: ``layer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memspan.memory import Memory
from memspan.models.defaults import WriteRetention
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.fast_weights.layer import (
    FastWeightsLayer,
    FastWeightsLayerMemory,
    row_sizes,
)
from memspan.models.initialisation import initialise
from memspan.models.known import known
from memspan.models.output import BackboneOutput
from memspan.models.packing import STACK, schema_of
from memspan.models.protocol import Backbone
from memspan.models.readers import BackboneReader
from memspan.models.segments import Documents
from memspan.nn import count_after, dropout_layer, sinusoids
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.rules import IMPLEMENTATIONS
from memspan.trees import check_config

FACTORS = {"query-key": 0.2, "value": 0.2, "beta": 0.2}
"""Initialisation of the parameters that write and read, where it differs from other architectures'.
Found by trial, see docs/initialisation.md."""

PARTS = rf"""{STACK}
    | layers.\d+.attention.((query|key|value|beta).weight | output.(weight|bias) | projection)
"""
"""Parameters that the reader knows, see :func:`memspan.models.packing.schema_of`."""


@dataclass(frozen=True, repr=False)
class FastWeightsMemory(Memory):
    """The fast weights of every layer and head, in float32 or better."""

    weights: Tensor
    """``[B, L, H, F, V]``: features by values, the paper's W transposed."""
    key_sum: Tensor
    """``z``, the sum of all keys, ``[B, L, H, F]`` with normalisation attention; else ``F`` is 0."""

    def layers(self, dtype: torch.dtype) -> list[FastWeightsLayerMemory]:
        """Each layer's share of the memory, in this type."""
        fields = (self.weights.to(dtype).unbind(1), self.key_sum.to(dtype).unbind(1))
        return [FastWeightsLayerMemory(*own) for own in zip(*fields, strict=True)]


@known("config")
class FastWeights(Backbone[FastWeightsMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments. The outer-product rule has the
    reference implementation only.

    A value that is not finite, or overflows in here, comes out as NaN in its row and is not an error:
    where processes share the model, none may leave a pass before the others. Readers do refuse it.
    """

    memory_type = FastWeightsMemory
    knows_documents = True
    implementations = tuple(IMPLEMENTATIONS)
    config: FastWeightsConfig

    def __init__(self, config: FastWeightsConfig) -> None:
        check_config(self, config, "FastWeightsConfig")
        super().__init__(config)
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(FastWeightsLayer(config) for _ in range(config.n_layers))
        normalises = config.final_norm and config.norm != "post"
        self.final_norm = nn.LayerNorm(config.d_model) if normalises else nn.Identity()
        initialise(self, config.initialisation, config.n_layers, FACTORS)
        self.schema = schema_of(self, PARTS)

    def stack(self) -> Iterator[FastWeightsLayer]:
        """The layers, first to last, as :class:`FastWeightsLayer`."""
        return iter(self.layers)  # type: ignore[arg-type]

    def row_sizes(self) -> Mapping[str, tuple[int, ...]]:
        sizes = row_sizes(self.config).items()
        return {name: (self.config.n_layers, *size) for name, size in sizes}

    def read_piece(
        self,
        x: Tensor,
        memory: FastWeightsMemory,
        implementation: str | None,
        documents: Documents | None = None,
    ) -> BackboneOutput[FastWeightsMemory]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        h = self.dropout(self.add_positions(x, memory.tokens_seen, documents))
        after = []
        for layer, before in zip(self.stack(), memory.layers(dtype), strict=True):
            h, own = self.through(layer, h, before, implementation, documents)
            after.append(own)
        return BackboneOutput(
            self.final_norm(h),
            FastWeightsMemory(
                tokens_seen=count_after(memory.tokens_seen, x.shape[1], documents),
                weights=torch.stack([own.weights for own in after], 1),
                key_sum=torch.stack([own.key_sum for own in after], 1),
            ),
            h.new_zeros(()),
        )

    @torch.no_grad()
    def write_retention(self, x: Tensor, memory: FastWeightsMemory) -> WriteRetention | None:
        """See :meth:`Backbone.write_retention`; not defined, None, with the outer-product rule."""
        config = self.config
        if config.rule == "outer-product":
            return None
        h = self.add_positions(x, memory.tokens_seen)
        shares = []
        ranks = []
        for layer, own in zip(self.stack(), memory.layers(memory.weights.dtype), strict=True):
            before = layer.before_attention(h)
            shares.append(layer.attention.retention(before, own.key_sum).mean((0, 1)))
            h, after = layer(h, own)
            values = torch.linalg.svdvals(after.weights)
            share = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
            ranks.append(torch.special.entr(share).sum(-1).exp().mean())
        return WriteRetention(
            torch.stack(shares), torch.stack(ranks), min(config.feature_width, config.head_width)
        )

    def reader_type(self) -> type[BackboneReader[FastWeightsMemory]]:
        from memspan.models.fast_weights.reader import FastWeightsReader

        return FastWeightsReader

    def compiled_loops(self) -> bool:
        """True if the loop over tokens can run in C here."""
        return delta_rule_loop.available(next(self.parameters()))

    def float32_part(self) -> str:
        """The update rules, see :meth:`Backbone.float32_part`."""
        return "fast weights are written and read"

    def add_positions(
        self, x: Tensor, tokens_seen: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """``x [B, T, D]`` plus the sinusoids of its positions, with positions sinusoidal."""
        if self.config.positions == "none":
            return x
        if documents is None:
            positions = tokens_seen[:, None] + torch.arange(x.shape[1], device=x.device)
        else:
            positions = documents.tokens_before(tokens_seen)
        codes = sinusoids(positions.flatten(), x.shape[-1], x.dtype)
        return x + codes.view(*positions.shape, x.shape[-1])
