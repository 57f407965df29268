"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464): memory and stack.

Every head of values has a matrix that each token first decays, then writes to and reads from
(eq. 10); these matrices, and the last inputs of the convolutions, are the memory. Options:
:class:`memspan.models.GatedDeltaNetConfig`. One layer: ``layer.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.gated_delta_net.layer import GatedDeltaNetLayer
from memspan.models.known import known
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.readers import BackboneReader
from memspan.ops.fast_weights.rules import IMPLEMENTATIONS


@dataclass(frozen=True, repr=False)
class GatedDeltaNetMemory(MatrixMemory):
    """The matrices of every layer and head, the paper's S transposed, and the last inputs of the
    convolutions, queries, keys and values side by side, in float32 or better."""


@known("config")
class GatedDeltaNet(MatrixBackbone[GatedDeltaNetMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Results do not depend on where a text is cut into segments. Gradients flow into the memory that is
    passed in: training code calls ``memory.detach()`` between segments.
    """

    memory_type = GatedDeltaNetMemory
    layer_type = GatedDeltaNetLayer
    implementations = tuple(IMPLEMENTATIONS)
    config: GatedDeltaNetConfig

    def reader_type(self) -> type[BackboneReader[GatedDeltaNetMemory]]:
        from memspan.models.gated_delta_net.reader import GatedDeltaNetReader

        return GatedDeltaNetReader
