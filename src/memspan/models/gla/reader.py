"""The reader of gated linear attention, which updates its memory in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memspan.models.gla.layer import GatedLinearAttention
from memspan.models.gla.model import GLAMemory
from memspan.models.matrix.mixer import LowRank
from memspan.models.matrix.reader import MatrixReader, Token


class GLAReader(MatrixReader[GLAMemory]):
    """Reads a stream, see :class:`MatrixReader`."""

    def token(self, mixer: GatedLinearAttention) -> Token:
        config = mixer.config
        products: list[nn.Module] = [mixer.query, mixer.key, mixer.value, mixer.output_gate]
        tensors: dict[str, Tensor] = {"gain": mixer.norm.weight}
        options = {"query_scale": config.head_width**-0.5}
        if config.decay == "gated":
            # The logarithm of a sigmoid is minus the softplus of minus its logit.
            products.append(negative(mixer.decay))
            n_channels = mixer.decay.up.out_features
            rate = mixer.norm.weight.new_full([config.n_heads], -1 / config.decay_temperature)
            tensors |= {"rate": rate, "step_bias": rate.new_zeros(n_channels)}
            options["n_steps"] = n_channels
        else:
            tensors["rate"] = mixer.retention(mixer.norm.weight)
        return Token(products, tensors, options)


def negative(product: LowRank) -> LowRank:
    """A product of low rank that gives minus what this one gives."""
    down = product.down.weight.detach()
    rank, n_inputs = down.shape
    with torch.device("meta"):
        turned = LowRank(n_inputs, rank, product.up.out_features, product.up.bias is not None)
    turned.down.weight = nn.Parameter(down, requires_grad=False)
    for name, parameter in product.up.named_parameters():
        setattr(turned.up, name, nn.Parameter(-parameter.detach(), requires_grad=False))
    return turned
