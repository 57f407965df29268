"""labml's models, assembled, masked and with their memories merged as in its own experiments."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from labml_nn.transformers import fast_weights
from labml_nn.transformers.compressive import (
    AttentionReconstructionLoss,
    CompressiveTransformer,
    CompressiveTransformerLayer,
    Conv1dCompression,
)
from labml_nn.transformers.fast_weights import token_wise
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.feedback import (
    FeedbackAttention,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
)
from labml_nn.transformers.utils import subsequent_mask
from labml_nn.transformers.xl import TransformerXL, TransformerXLLayer
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from torch import Tensor, nn

from peers.side import VOCAB_SIZE, Side, Size

RATE = 4
"""Tokens of a compressed slot."""


class Model(nn.Module):
    """Embedding and output layer around a stack, without the experiments' imports."""

    def __init__(self, size: Size, stack: nn.Module) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(VOCAB_SIZE, size.d_model)
        self.transformer = stack
        self.generator = nn.Linear(size.d_model, VOCAB_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(self.transformer(self.src_embed(x)))


class Labml(Side):
    """Tokens go in batch first, as everywhere here; logits come out time first, as in labml."""

    same_function = True
    names: ClassVar[dict[str, str]] = {}
    """Parts of a layer, ours -> theirs, besides those of every layer."""

    def __init__(self, size: Size, stack: nn.Module, kind: type[Model] = Model) -> None:
        super().__init__(size)
        self.model = kind(size, stack)

    def time_first(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.t())

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.time_first(tokens).flatten(0, 1), targets.t().flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.time_first(tokens)
        if targets is None:
            return logits.transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten(), reduction="none")
        return losses.view(logits.shape[:2]).t()

    def embedding(self) -> nn.Parameter:
        return self.model.src_embed.weight

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        # All parameters are theirs; what ours has besides is not learned.
        own = self.own_weights()
        assert own.keys() >= dict(ours.named_parameters()).keys()
        ours.load_state_dict(ours.state_dict() | own)

    def own_weights(self) -> dict[str, Tensor]:
        """Theirs under our names."""
        parts = {
            "embedding.tables.0": "src_embed.weight",
            "head.tables.0": "generator.weight",
            "head.biases.0": "generator.bias",
        }
        layer = self.names | {
            "feed_forward.inner": "feed_forward.layer1",
            "feed_forward.outer": "feed_forward.layer2",
            "feed_forward_norm": "norm_ff",
        }
        for kind in ("weight", "bias"):
            parts[f"backbone.final_norm.{kind}"] = f"transformer.norm.{kind}"
            for n in range(self.size.n_layers):
                for mine, theirs in layer.items():
                    mine = f"backbone.layers.{n}.{mine}.{kind}"
                    parts[mine] = f"transformer.layers.{n}.{theirs}.{kind}"
        source = self.model.state_dict()
        return {mine: source[theirs] for mine, theirs in parts.items() if theirs in source}


def number_tables(attention: nn.Module) -> None:
    """Initially zero in labml: filled with numbers, so that the comparison covers them."""
    for name in ("key_pos_embeddings", "key_pos_bias", "query_pos_bias"):
        nn.init.normal_(getattr(attention, name), std=0.02)


class XLModel(Model):
    """``labml_nn.transformers.xl.experiment.AutoregressiveModel``."""

    mask_x: Tensor | None = None
    mask_mem: Tensor | None = None

    def forward(self, x: Tensor, mem: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        m_len = len(mem[0]) if mem else 0
        if self.mask_x is None or self.mask_x.shape[0] < len(x):
            self.mask_x = subsequent_mask(len(x))
        if (
            self.mask_mem is None
            or self.mask_mem.shape[1] < m_len
            or self.mask_mem.shape[0] < len(x)
        ):
            self.mask_mem = self.mask_x.new_ones(len(x), m_len, 1)
        mask = self.mask_x[: len(x), : len(x)]
        if m_len:
            mask = torch.cat((self.mask_mem[: len(x), :m_len], mask), dim=1)
        hidden, mem = self.transformer(self.src_embed(x), mem, mask)
        return self.generator(hidden), mem


class LabmlXL(Labml):
    """Unchanged: its position tables have 8,192 rows in every layer, whatever the span."""

    names: ClassVar[dict[str, str]] = {
        **{f"attention.{part}": f"self_attn.{part}.linear" for part in ("query", "key", "value")},
        "attention.output": "self_attn.output",
        "attention_norm": "norm_self_attn",
    }

    def __init__(self, size: Size) -> None:
        layer = TransformerXLLayer(**self.parts(size))
        super().__init__(size, TransformerXL(layer, size.n_layers), XLModel)
        for block in self.model.transformer.layers:
            number_tables(block.self_attn)

    @staticmethod
    def parts(size: Size) -> dict[str, object]:
        """Arguments of a layer."""
        return {
            "d_model": size.d_model,
            "self_attn": RelativeMultiHeadAttention(size.n_heads, size.d_model, 0.0),
            "feed_forward": FeedForward(size.d_model, size.d_ff, 0.0),
            "dropout_prob": 0.0,
        }

    def forget(self, batch_size: int) -> None:
        self.memory: list[Tensor] = []

    def time_first(self, tokens: Tensor) -> Tensor:
        logits, new = self.model(tokens.t(), self.memory)
        self.memory = self._merge(self.memory, new)
        return logits

    def _merge(self, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """The experiment's ``merge_memory``."""
        memory = [torch.cat(pair) for pair in zip(old, new, strict=True)] if old else new
        if len(memory[0]) > self.size.memory_length:
            memory = [m[-self.size.memory_length :] for m in memory]
        return memory

    def own_weights(self) -> dict[str, Tensor]:
        own = super().own_weights()
        for n, block in enumerate(self.model.transformer.layers):
            attention = block.self_attn
            here = f"backbone.layers.{n}.attention."
            # Their row P - d belongs to distance d.
            rows = attention.P - torch.arange(self.size.span)
            own[here + "position_keys"] = attention.key_pos_embeddings[rows]
            own[here + "position_scores"] = attention.key_pos_bias[rows]
            own[here + "content_bias"] = attention.query_pos_bias
        return own


class LabmlShortTable(LabmlXL):
    """The same with position tables cut to the span, as its users could do."""

    works = ("train",)

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        for block in self.model.transformer.layers:
            attention = block.self_attn
            rows = slice(attention.P - size.span, attention.P + size.segment_length)
            for name in ("key_pos_embeddings", "key_pos_bias"):
                table = getattr(attention, name).detach()[rows].clone()
                setattr(attention, name, nn.Parameter(table))
            attention.P = size.span


class CompressiveModel(Model):
    """The experiment's."""

    def forward(
        self, x: Tensor, mem: list[Tensor], c_mem: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        old = (len(mem[0]) if mem else 0) + (len(c_mem[0]) if c_mem else 0)
        mask = subsequent_mask(len(x))
        mask = torch.cat([mask.new_ones(len(x), old, 1), mask], 1)
        hidden, mem = self.transformer(self.src_embed(x), mem, c_mem, mask)
        return self.generator(hidden), mem


class LabmlCompressive(LabmlXL):
    """Unchanged, including its position tables of 8,192 rows."""

    def __init__(self, size: Size) -> None:
        compress = Conv1dCompression(RATE, size.d_model)
        layer = CompressiveTransformerLayer(**self.parts(size), compress=compress)
        stack = CompressiveTransformer(layer, size.n_layers)
        Labml.__init__(self, size, stack, CompressiveModel)
        for block in self.model.transformer.layers:
            number_tables(block.self_attn)
        self.reconstruction = AttentionReconstructionLoss(self.model.transformer.layers)

    def forget(self, batch_size: int) -> None:
        self.memory: list[Tensor] = []
        self.compressed: list[Tensor] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits, new, to_compress = self._step(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten())
        if to_compress and self.size.auxiliary_loss:
            loss = loss + self.reconstruction(new, to_compress)
        return loss

    def time_first(self, tokens: Tensor) -> Tensor:
        return self._step(tokens)[0]

    def _step(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        logits, new = self.model(tokens.t(), self.memory, self.compressed)
        with torch.no_grad():
            to_compress = self._merge_and_compress(new)
        return logits, new, to_compress

    def _merge_and_compress(self, new: list[Tensor]) -> list[Tensor]:
        """The experiment's ``merge_compress_memory``: what was compressed, by layer."""
        memory = new
        if self.memory:
            memory = [torch.cat(pair) for pair in zip(self.memory, new, strict=True)]
        extra = len(memory[0]) - self.size.memory_length
        old = -(-extra // RATE) * RATE if extra > 0 else 0
        to_compress = [m[:old] for m in memory] if old else []
        self.memory = [m[old:] for m in memory]
        if old:
            layers = self.model.transformer.layers
            made = [layer.compress(m) for layer, m in zip(layers, to_compress, strict=True)]
            if self.compressed:
                made = [torch.cat(pair) for pair in zip(self.compressed, made, strict=True)]
            self.compressed = [m[-self.size.compressed_length :] for m in made]
        return to_compress

    def own_weights(self) -> dict[str, Tensor]:
        own = super().own_weights()
        for n, block in enumerate(self.model.transformer.layers):
            for kind in ("weight", "bias"):
                own[f"backbone.layers.{n}.attention.compression.{kind}"] = getattr(
                    block.compress.conv, kind
                )
        return own


class LabmlFeedback(Labml):
    """With shared keys and values. Embeddings are not dropped, as ours are.

    It has no memory between calls and cannot continue token by token. Here single tokens are read by
    the body of its own loop over time, from its stacks as a segment leaves them."""

    names: ClassVar[dict[str, str]] = {
        "query": "attn.query.linear",
        "output": "attn.output",
        "attention_norm": "norm_self_attn",
    }

    def __init__(self, size: Size) -> None:
        layer = FeedbackTransformerLayer(
            d_model=size.d_model,
            attn=FeedbackAttention(
                size.n_heads, size.d_model, size.dropout, is_kv_precomputed=True
            ),
            feed_forward=FeedForward(size.d_model, size.d_ff, size.dropout),
            dropout_prob=size.dropout,
        )
        stack = FeedbackTransformerKV(layer, size.n_layers, size.d_model, size.n_heads)
        super().__init__(size, stack)
        for block in stack.layers:
            number_tables(block.attn)

    def forget(self, batch_size: int) -> None:
        pass

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] == 1:
            return self._one(tokens[:, 0])[:, None]
        self.position = self.size.segment_length
        return super().read(tokens, targets)

    def _one(self, tokens: Tensor) -> Tensor:
        """One step of ``FeedbackTransformerKV.forward``, after ``position`` tokens."""
        stack = self.model.transformer
        if self.position == self.size.memory_length:
            self.position = self.size.segment_length
            stack.mem_key.n = stack.mem_value.n = self.position - 1
        keys = stack.mem_key.get()
        values = stack.mem_value.get()
        x = self.model.src_embed(tokens)
        states = [x]
        for layer in stack.layers:
            x = layer(x=x, key=keys, value=values)
            states.append(x)
        memory = torch.einsum("lbd,l->bd", torch.stack(states), stack.softmax(stack.weights))
        stack.mem_key.append(self.position, stack.key(memory))
        stack.mem_value.append(self.position, stack.value(memory))
        self.position += 1
        return self.model.generator(stack.norm(x))

    def own_weights(self) -> dict[str, Tensor]:
        own = super().own_weights()
        stack = self.model.transformer
        own["backbone.layer_weights"] = stack.weights
        own["backbone.key.0.weight"] = stack.key.linear.weight
        own["backbone.value.0.weight"] = stack.value.linear.weight
        # labml's values have no bias here.
        own["backbone.value.0.bias"] = torch.zeros(self.size.d_model)
        for n, block in enumerate(stack.layers):
            attention = block.attn
            here = f"backbone.layers.{n}."
            own[here + "content_bias"] = attention.query_pos_bias
            # The nearest distance is their last row and our first.
            rows = slice(-self.size.memory_length, None)
            own[here + "position_keys"] = attention.key_pos_embeddings[rows].flip(0)
            own[here + "position_scores"] = attention.key_pos_bias[rows].flip(0)
        return own


def fast_weights_stack(module: ModuleType, size: Size) -> nn.Module:
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


class LabmlFW(Labml):
    """Its layers in training, without memory between segments; its token-wise layers in generation."""

    works = ("train", "attention", "generate")
    names: ClassVar[dict[str, str]] = {
        **{f"attention.{part}": f"attn.{part}.linear" for part in ("query", "key", "value")},
        "attention.beta": "attn.interpolation_weight.0.linear",
        "attention.output": "attn.output",
    }

    def __init__(self, size: Size) -> None:
        super().__init__(size, fast_weights_stack(fast_weights, size))
        self.by_token = fast_weights_stack(token_wise, size)
        for whole, single in zip(self.model.transformer.layers, self.by_token.layers, strict=True):
            for name in ("query", "key", "value", "output"):
                setattr(single.attn, name, getattr(whole.attn, name))
            single.attn.gate = whole.attn.interpolation_weight
            single.feed_forward = whole.feed_forward
            single.norm_ff = whole.norm_ff

    def forget(self, batch_size: int) -> None:
        self.weights: list[Tensor | None] = [None] * self.size.n_layers

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
    query = attention.phi(attention.query(x))
    key = attention.phi(attention.key(x))
    value = attention.value(x)
    beta = attention.interpolation_weight(x)
    weights = key.new_zeros(*key.shape[1:3], value.shape[3], key.shape[3])
    outputs = []
    for q, k, v, b in zip(query.unbind(), key.unbind(), value.unbind(), beta.unbind(), strict=True):
        change = b * (v - torch.einsum("bhvk,bhk->bhv", weights, k))
        weights = weights + torch.einsum("bhv,bhk->bhvk", change, k)
        outputs.append(torch.einsum("bhvk,bhk->bhv", weights, q).flatten(1))
    return attention.output(torch.stack(outputs))
