"""The reader of Gated DeltaNet 2, which updates its memory in place."""

from __future__ import annotations

from memspan.models.gated_delta_net_2.layer import GatedDeltaRule2
from memspan.models.gated_delta_net_2.model import GatedDeltaNet2Memory
from memspan.models.matrix.reader import MatrixReader, Token, decays, delta_options, delta_tensors


class GatedDeltaNet2Reader(MatrixReader[GatedDeltaNet2Memory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: GatedDeltaRule2) -> Token:
        n_channels = len(mixer.dt_bias)
        options = delta_options(mixer.config)
        options |= {"n_erases": n_channels, "n_steps": n_channels, "sigmoid": True}
        mixed = [mixer.query, mixer.key, mixer.value]
        return Token(
            [*mixed, mixer.output_gate, mixer.erase, mixer.write, mixer.step],
            delta_tensors(mixer) | decays(mixer),
            options,
        )
