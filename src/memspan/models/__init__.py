"""The architectures, and the language model around any of them. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memspan._lazy import lazily

if TYPE_CHECKING:
    from memspan.models.compressive.config import CompressiveConfig as CompressiveConfig
    from memspan.models.compressive.model import Compressive as Compressive
    from memspan.models.compressive.model import CompressiveMemory as CompressiveMemory
    from memspan.models.delta_product.config import DeltaProductConfig as DeltaProductConfig
    from memspan.models.delta_product.model import DeltaProduct as DeltaProduct
    from memspan.models.delta_product.model import DeltaProductMemory as DeltaProductMemory
    from memspan.models.fast_weights.config import FastWeightsConfig as FastWeightsConfig
    from memspan.models.fast_weights.model import FastWeights as FastWeights
    from memspan.models.fast_weights.model import FastWeightsMemory as FastWeightsMemory
    from memspan.models.feedback.config import FeedbackConfig as FeedbackConfig
    from memspan.models.feedback.model import Feedback as Feedback
    from memspan.models.feedback.model import FeedbackMemory as FeedbackMemory
    from memspan.models.gated_delta_net.config import GatedDeltaNetConfig as GatedDeltaNetConfig
    from memspan.models.gated_delta_net.model import GatedDeltaNet as GatedDeltaNet
    from memspan.models.gated_delta_net.model import GatedDeltaNetMemory as GatedDeltaNetMemory
    from memspan.models.gated_delta_net_2.config import GatedDeltaNet2Config as GatedDeltaNet2Config
    from memspan.models.gated_delta_net_2.model import GatedDeltaNet2 as GatedDeltaNet2
    from memspan.models.gated_delta_net_2.model import GatedDeltaNet2Memory as GatedDeltaNet2Memory
    from memspan.models.gla.config import GLAConfig as GLAConfig
    from memspan.models.gla.model import GLA as GLA
    from memspan.models.gla.model import GLAMemory as GLAMemory
    from memspan.models.infini.config import InfiniConfig as InfiniConfig
    from memspan.models.infini.model import Infini as Infini
    from memspan.models.infini.model import InfiniMemory as InfiniMemory
    from memspan.models.kda.config import KDAConfig as KDAConfig
    from memspan.models.kda.model import KDA as KDA
    from memspan.models.kda.model import KDAMemory as KDAMemory
    from memspan.models.language_model import LanguageModel as LanguageModel
    from memspan.models.language_model import Reader as Reader
    from memspan.models.lstm.config import LSTMConfig as LSTMConfig
    from memspan.models.lstm.model import LSTM as LSTM
    from memspan.models.lstm.model import LSTMMemory as LSTMMemory
    from memspan.models.mamba_2.config import Mamba2Config as Mamba2Config
    from memspan.models.mamba_2.model import Mamba2 as Mamba2
    from memspan.models.mamba_2.model import Mamba2Memory as Mamba2Memory
    from memspan.models.options import BackboneConfig as BackboneConfig
    from memspan.models.options import EmbeddingConfig as EmbeddingConfig
    from memspan.models.options import Plot as Plot
    from memspan.models.output import BackboneOutput as BackboneOutput
    from memspan.models.output import Output as Output
    from memspan.models.protocol import Backbone as Backbone
    from memspan.models.readers import BackboneReader as BackboneReader
    from memspan.models.registry import MODELS as MODELS
    from memspan.models.registry import register as register
    from memspan.models.rmt.config import RMTConfig as RMTConfig
    from memspan.models.rmt.model import RMT as RMT
    from memspan.models.rmt.model import RMTMemory as RMTMemory
    from memspan.models.rwkv_7.config import RWKV7Config as RWKV7Config
    from memspan.models.rwkv_7.model import RWKV7 as RWKV7
    from memspan.models.rwkv_7.model import RWKV7Memory as RWKV7Memory
    from memspan.models.segments import read_in_pieces as read_in_pieces
    from memspan.models.transformer.config import TransformerConfig as TransformerConfig
    from memspan.models.transformer.model import Transformer as Transformer
    from memspan.models.transformer_xl.config import TransformerXLConfig as TransformerXLConfig
    from memspan.models.transformer_xl.model import TransformerXL as TransformerXL
    from memspan.models.transformer_xl.model import TransformerXLMemory as TransformerXLMemory

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "memspan.models.compressive.config": ("CompressiveConfig",),
        "memspan.models.compressive.model": ("Compressive", "CompressiveMemory"),
        "memspan.models.fast_weights.config": ("FastWeightsConfig",),
        "memspan.models.fast_weights.model": ("FastWeights", "FastWeightsMemory"),
        "memspan.models.feedback.config": ("FeedbackConfig",),
        "memspan.models.feedback.model": ("Feedback", "FeedbackMemory"),
        "memspan.models.gated_delta_net.config": ("GatedDeltaNetConfig",),
        "memspan.models.gated_delta_net.model": ("GatedDeltaNet", "GatedDeltaNetMemory"),
        "memspan.models.infini.config": ("InfiniConfig",),
        "memspan.models.infini.model": ("Infini", "InfiniMemory"),
        "memspan.models.kda.config": ("KDAConfig",),
        "memspan.models.kda.model": ("KDA", "KDAMemory"),
        "memspan.models.mamba_2.config": ("Mamba2Config",),
        "memspan.models.mamba_2.model": ("Mamba2", "Mamba2Memory"),
        "memspan.models.gla.config": ("GLAConfig",),
        "memspan.models.gla.model": ("GLA", "GLAMemory"),
        "memspan.models.delta_product.config": ("DeltaProductConfig",),
        "memspan.models.delta_product.model": ("DeltaProduct", "DeltaProductMemory"),
        "memspan.models.gated_delta_net_2.config": ("GatedDeltaNet2Config",),
        "memspan.models.gated_delta_net_2.model": ("GatedDeltaNet2", "GatedDeltaNet2Memory"),
        "memspan.models.rwkv_7.config": ("RWKV7Config",),
        "memspan.models.rwkv_7.model": ("RWKV7", "RWKV7Memory"),
        "memspan.models.language_model": ("LanguageModel", "Reader"),
        "memspan.models.lstm.config": ("LSTMConfig",),
        "memspan.models.lstm.model": ("LSTM", "LSTMMemory"),
        "memspan.models.options": ("BackboneConfig", "EmbeddingConfig", "Plot"),
        "memspan.models.output": ("BackboneOutput", "Output"),
        "memspan.models.protocol": ("Backbone",),
        "memspan.models.readers": ("BackboneReader",),
        "memspan.models.registry": ("MODELS", "register"),
        "memspan.models.rmt.config": ("RMTConfig",),
        "memspan.models.rmt.model": ("RMT", "RMTMemory"),
        "memspan.models.segments": ("read_in_pieces",),
        "memspan.models.transformer.config": ("TransformerConfig",),
        "memspan.models.transformer.model": ("Transformer",),
        "memspan.models.transformer_xl.config": ("TransformerXLConfig",),
        "memspan.models.transformer_xl.model": ("TransformerXL", "TransformerXLMemory"),
    },
)
