"""Layers of the architectures for models of your own, each with its memory.

``y, memory = layer(x, memory)``: ``x`` and ``y`` are ``[B, T, D]``. Without a memory a layer begins
anew; the one that is passed in is not changed. Whole models are made of these same layers. Importing
this module does not import torch, and each name imports only what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memspan._lazy import lazily

if TYPE_CHECKING:
    from memspan.models.compressive.layer import CompressiveAttention as CompressiveAttention
    from memspan.models.compressive.layer import CompressiveLayer as CompressiveLayer
    from memspan.models.compressive.layer import CompressiveLayerMemory as CompressiveLayerMemory
    from memspan.models.compressive.layer import CompressiveLayerOutput as CompressiveLayerOutput
    from memspan.models.delta_product.layer import DeltaProductLayer as DeltaProductLayer
    from memspan.models.delta_product.layer import DeltaProductRule as DeltaProductRule
    from memspan.models.fast_weights.layer import FastWeightsAttention as FastWeightsAttention
    from memspan.models.fast_weights.layer import FastWeightsLayer as FastWeightsLayer
    from memspan.models.fast_weights.layer import FastWeightsLayerMemory as FastWeightsLayerMemory
    from memspan.models.gated_delta_net.layer import GatedDeltaNetLayer as GatedDeltaNetLayer
    from memspan.models.gated_delta_net.layer import GatedDeltaRule as GatedDeltaRule
    from memspan.models.gated_delta_net_2.layer import GatedDeltaNet2Layer as GatedDeltaNet2Layer
    from memspan.models.gated_delta_net_2.layer import GatedDeltaRule2 as GatedDeltaRule2
    from memspan.models.gla.layer import GatedLinearAttention as GatedLinearAttention
    from memspan.models.gla.layer import GLALayer as GLALayer
    from memspan.models.infini.layer import InfiniAttention as InfiniAttention
    from memspan.models.infini.layer import InfiniLayer as InfiniLayer
    from memspan.models.infini.layer import InfiniLayerMemory as InfiniLayerMemory
    from memspan.models.kda.layer import KDALayer as KDALayer
    from memspan.models.kda.layer import KimiDeltaAttention as KimiDeltaAttention
    from memspan.models.mamba_2.layer import Mamba2Layer as Mamba2Layer
    from memspan.models.mamba_2.layer import Mamba2Mixer as Mamba2Mixer
    from memspan.models.matrix.mixer import MatrixLayerMemory as MatrixLayerMemory
    from memspan.models.rwkv_7.layer import RWKV7Layer as RWKV7Layer
    from memspan.models.rwkv_7.time_mixing import RWKV7TimeMixing as RWKV7TimeMixing
    from memspan.models.transformer_xl.layer import TransformerXLAttention as TransformerXLAttention
    from memspan.models.transformer_xl.layer import TransformerXLLayer as TransformerXLLayer
    from memspan.models.transformer_xl.layer import (
        TransformerXLLayerMemory as TransformerXLLayerMemory,
    )
    from memspan.trees import LayerMemory as LayerMemory

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "memspan.models.compressive.layer": (
            "CompressiveAttention",
            "CompressiveLayer",
            "CompressiveLayerMemory",
            "CompressiveLayerOutput",
        ),
        "memspan.models.fast_weights.layer": (
            "FastWeightsAttention",
            "FastWeightsLayer",
            "FastWeightsLayerMemory",
        ),
        "memspan.models.gated_delta_net.layer": (
            "GatedDeltaNetLayer",
            "GatedDeltaRule",
        ),
        "memspan.models.infini.layer": (
            "InfiniAttention",
            "InfiniLayer",
            "InfiniLayerMemory",
        ),
        "memspan.models.kda.layer": ("KDALayer", "KimiDeltaAttention"),
        "memspan.models.mamba_2.layer": ("Mamba2Layer", "Mamba2Mixer"),
        "memspan.models.gla.layer": ("GLALayer", "GatedLinearAttention"),
        "memspan.models.delta_product.layer": ("DeltaProductLayer", "DeltaProductRule"),
        "memspan.models.gated_delta_net_2.layer": ("GatedDeltaNet2Layer", "GatedDeltaRule2"),
        "memspan.models.rwkv_7.layer": ("RWKV7Layer",),
        "memspan.models.rwkv_7.time_mixing": ("RWKV7TimeMixing",),
        "memspan.models.matrix.mixer": ("MatrixLayerMemory",),
        "memspan.models.transformer_xl.layer": (
            "TransformerXLAttention",
            "TransformerXLLayer",
            "TransformerXLLayerMemory",
        ),
        "memspan.trees": ("LayerMemory",),
    },
)
