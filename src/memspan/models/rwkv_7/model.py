"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456): memory and stack. Options:
:class:`memspan.models.RWKV7Config`. One layer: ``layer.py``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.matrix.mixer import MatrixLayer, MatrixLayerMemory
from memspan.models.rwkv_7.config import RWKV7Config
from memspan.models.rwkv_7.layer import RWKV7Layer
from memspan.models.segments import Documents


@dataclass(frozen=True, repr=False)
class RWKV7Memory(MatrixMemory):
    """The matrices of every layer and head, and the last tokens of every time mixing and channel
    mixing, in float32 or better."""


class RWKV7(MatrixBackbone[RWKV7Memory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out."""

    memory_type = RWKV7Memory
    layer_type = RWKV7Layer
    config: RWKV7Config

    def new_layer(self, n: int) -> MatrixLayer:
        return RWKV7Layer(self.config, n)

    def read_layers(
        self,
        h: Tensor,
        memories: list[MatrixLayerMemory],
        implementation: str | None,
        documents: Documents | None,
    ) -> tuple[Tensor, list[MatrixLayerMemory]]:
        first = None
        after = []
        for layer, own in zip(self.layers, memories, strict=True):
            arguments = (h, own, implementation, documents, first, True)
            h, own, first = self.through(layer, *arguments)
            after.append(own)
        return h, after
