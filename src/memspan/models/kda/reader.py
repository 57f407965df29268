"""The reader of Kimi Delta Attention, which updates its memory in place."""

from __future__ import annotations

from memspan.models.kda.layer import KimiDeltaAttention
from memspan.models.kda.model import KDAMemory
from memspan.models.matrix.reader import MatrixReader, Token, decays, delta_options, delta_tensors


class KDAReader(MatrixReader[KDAMemory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: KimiDeltaAttention) -> Token:
        options = delta_options(mixer.config)
        options |= {"n_betas": len(mixer.A_log), "n_steps": len(mixer.dt_bias), "sigmoid": True}
        return Token(
            [mixer.query, mixer.key, mixer.value, mixer.output_gate, mixer.beta, mixer.step],
            delta_tensors(mixer) | decays(mixer),
            options,
        )
