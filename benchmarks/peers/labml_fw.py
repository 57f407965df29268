"""labml's Fast Weights transformer: its layers in training, its token-wise layers in generation."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from labml_nn.transformers import fast_weights
from labml_nn.transformers.fast_weights import token_wise
from labml_nn.transformers.feed_forward import FeedForward
from torch import Tensor, nn

from peers.side import VOCAB_SIZE, Side, Size


class Model(nn.Module):
    """Embedding and output layer around labml's stack, as in its experiment."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(VOCAB_SIZE, size.d_model)
        self.transformer = stack(fast_weights, size)
        self.generator = nn.Linear(size.d_model, VOCAB_SIZE)


def stack(module, size: Size) -> nn.Module:
    """From the module for sequences or the one for single tokens, which have the same parameters."""
    layer = module.FastWeightsAttentionTransformerLayer(
        d_model=size.d_model,
        attn=module.FastWeightsAttention(
            size.n_heads, size.d_model, 0.0, fast_weights.DPFP(nu=1, eps=1e-6)
        ),
        feed_forward=FeedForward(size.d_model, size.d_ff, 0.0),
        dropout_prob=0.0,
    )
    return module.FastWeightsAttentionTransformer(layer, size.n_layers)


class LabmlFW(Side):
    """Unchanged. In training it has no memory between segments."""

    works = ("train", "attention", "generate")
    same_function = True

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.model = Model(size)
        self.by_token = stack(token_wise, size)
        for whole, single in zip(self.model.transformer.layers, self.by_token.layers, strict=True):
            for name in ("query", "key", "value", "output"):
                setattr(single.attn, name, getattr(whole.attn, name))
            single.attn.gate = whole.attn.interpolation_weight
            single.feed_forward, single.norm_ff = whole.feed_forward, whole.norm_ff

    def forget(self, batch_size: int) -> None:
        self.weights: list[Tensor | None] = [None] * self.size.n_layers

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.transformer(self.model.src_embed(tokens.t()))
        logits = self.model.generator(hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.t().flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token by token; the fast weights are carried."""
        found = []
        for x in self.model.src_embed(tokens.t()):
            for i, layer in enumerate(self.by_token.layers):
                x, self.weights[i] = layer(x, self.weights[i])
            found.append(x)
        return self.model.generator(self.model.transformer.norm(torch.stack(found, 1)))

    def attention(self, x: Tensor) -> Tensor:
        return self.model.transformer.layers[0].attn(x.transpose(0, 1)).transpose(0, 1)

    def embedding(self) -> nn.Parameter:
        return self.model.src_embed.weight

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        source, own = self.model.state_dict(), dict(ours.state_dict())
        own["embedding.tables.0"] = source["src_embed.weight"]
        own["head.tables.0"] = source["generator.weight"]
        own["head.biases.0"] = source["generator.bias"]
        names = {
            "attention.query.weight": "attn.query.linear.weight",
            "attention.key.weight": "attn.key.linear.weight",
            "attention.value.weight": "attn.value.linear.weight",
            "attention.beta.weight": "attn.interpolation_weight.0.linear.weight",
            "attention.output.weight": "attn.output.weight",
            "attention.output.bias": "attn.output.bias",
            "feed_forward.inner.weight": "feed_forward.layer1.weight",
            "feed_forward.inner.bias": "feed_forward.layer1.bias",
            "feed_forward.outer.weight": "feed_forward.layer2.weight",
            "feed_forward.outer.bias": "feed_forward.layer2.bias",
            "feed_forward_norm.weight": "norm_ff.weight",
            "feed_forward_norm.bias": "norm_ff.bias",
        }
        for n in range(self.size.n_layers):
            for mine, theirs in names.items():
                own[f"backbone.layers.{n}.{mine}"] = source[f"transformer.layers.{n}.{theirs}"]
        for kind in ("weight", "bias"):
            own[f"backbone.final_norm.{kind}"] = source[f"transformer.norm.{kind}"]
        ours.load_state_dict(own)


class LabmlRepairedFW(LabmlFW):
    """The same loop with its one fault repaired.

    Indexing a tensor at every step makes each step's backward write a gradient of the whole length:
    quadratic. Taking the steps apart once, by ``unbind``, is linear.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        for layer in self.model.transformer.layers:
            layer.attn.forward = partial(_repaired_forward, layer.attn)


def _repaired_forward(attention: nn.Module, x: Tensor) -> Tensor:
    query, key = attention.phi(attention.query(x)), attention.phi(attention.key(x))
    value, beta = attention.value(x), attention.interpolation_weight(x)
    weights = key.new_zeros(*key.shape[1:3], value.shape[3], key.shape[3])
    outputs = []
    for q, k, v, b in zip(query.unbind(), key.unbind(), value.unbind(), beta.unbind(), strict=True):
        change = b * (v - torch.einsum("bhvk,bhk->bhv", weights, k))
        weights = weights + torch.einsum("bhv,bhk->bhvk", change, k)
        outputs.append(torch.einsum("bhvk,bhk->bhv", weights, q).flatten(1))
    return attention.output(torch.stack(outputs))
