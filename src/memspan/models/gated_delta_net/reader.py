"""The reader of Gated DeltaNet, which updates its memory in place."""

from __future__ import annotations

from memspan.models.gated_delta_net.layer import GatedDeltaRule
from memspan.models.gated_delta_net.model import GatedDeltaNetMemory
from memspan.models.matrix.reader import MatrixReader, Token, decays, delta_options, delta_tensors


class GatedDeltaNetReader(MatrixReader[GatedDeltaNetMemory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: GatedDeltaRule) -> Token:
        config = mixer.config
        heads = config.value_heads
        options = delta_options(config)
        options |= {"key_heads": config.n_heads, "n_betas": heads, "n_steps": heads}
        return Token(
            [mixer.query, mixer.key, mixer.value, mixer.output_gate, mixer.beta, mixer.step],
            delta_tensors(mixer) | decays(mixer),
            options,
        )
