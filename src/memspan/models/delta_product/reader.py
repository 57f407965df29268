"""The reader of DeltaProduct, which updates its memory in place."""

from __future__ import annotations

from memspan.models.delta_product.layer import DeltaProductRule
from memspan.models.delta_product.model import DeltaProductMemory
from memspan.models.matrix.reader import MatrixReader, Token, decays, delta_options, delta_tensors


class DeltaProductReader(MatrixReader[DeltaProductMemory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: DeltaProductRule) -> Token:
        config = mixer.config
        products = [mixer.query, mixer.key, mixer.value, mixer.output_gate, mixer.beta]
        tensors = delta_tensors(mixer)
        options = delta_options(config)
        options |= {"writes": config.n_householder, "n_betas": mixer.beta.out_features}
        if config.decay:
            products.append(mixer.step)
            tensors |= decays(mixer)
            options["n_steps"] = config.n_heads
        else:
            tensors["rate"] = mixer.norm.weight.new_zeros(config.n_heads)
        return Token(products, tensors, options)
