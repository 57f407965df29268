"""The reader of Mamba-2, which updates its memory in place."""

from __future__ import annotations

from memspan.models.mamba_2.layer import Mamba2Mixer
from memspan.models.mamba_2.model import Mamba2Memory
from memspan.models.matrix.reader import MatrixReader, Token, decays


class Mamba2Reader(MatrixReader[Mamba2Memory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: Mamba2Mixer) -> Token:
        config = mixer.config
        tensors = decays(mixer) | {
            "convolution": mixer.convolution.T,
            "convolution_bias": mixer.convolution_bias,
            "gain": mixer.norm_weight,
            "skip": mixer.D,
        }
        options = {
            "key_heads": config.n_groups,
            "n_steps": config.n_heads,
            "scales_values": True,
            "gate_first": True,
            "normed": len(mixer.norm_weight) // config.n_groups,
            "n_gains": len(mixer.norm_weight),
        }
        products = [mixer.query, mixer.key, mixer.value, mixer.output_gate, mixer.step]
        return Token(products, tensors, options)
