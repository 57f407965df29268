"""labml's Feedback Transformer with shared keys and values, assembled as in its experiment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.feedback import (
    FeedbackAttention,
    FeedbackTransformerKV,
    FeedbackTransformerLayer,
)
from torch import Tensor, nn

from peers.side import VOCAB_SIZE, Side, Size


class AutoregressiveModel(nn.Module):
    """``labml_nn.transformers.feedback.experiment``'s, without the experiment's imports."""

    def __init__(self, n_vocab: int, d_model: int, transformer: FeedbackTransformerKV) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(n_vocab, d_model)
        self.transformer = transformer
        self.generator = nn.Linear(d_model, n_vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(self.transformer(self.src_embed(x)))


class LabmlFeedback(Side):
    """Embeddings are not dropped, as ours are.

    It has no memory between calls and cannot continue token by token. Here single tokens are read by
    the body of its own loop over time, from its stacks as a segment leaves them."""

    same_function = True

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        layer = FeedbackTransformerLayer(
            d_model=size.d_model,
            attn=FeedbackAttention(
                size.n_heads, size.d_model, size.dropout, is_kv_precomputed=True
            ),
            feed_forward=FeedForward(size.d_model, size.d_ff, size.dropout),
            dropout_prob=size.dropout,
        )
        stack = FeedbackTransformerKV(layer, size.n_layers, size.d_model, size.n_heads)
        self.model = AutoregressiveModel(VOCAB_SIZE, size.d_model, stack)
        for block in stack.layers:
            attention = block.attn
            # Initially zero in labml: filled with numbers, so that the comparison covers them.
            for table in (
                attention.key_pos_embeddings,
                attention.key_pos_bias,
                attention.query_pos_bias,
            ):
                nn.init.normal_(table, std=0.02)

    def forget(self, batch_size: int) -> None:
        pass

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens.t()).flatten(0, 1), targets.t().flatten())

    @torch.no_grad()
    def read(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] == 1:
            return self._one(tokens[:, 0])[:, None]
        logits = self.model(tokens.t())
        self.position = self.size.segment_length
        if targets is None:
            return logits.transpose(0, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.t().flatten(), reduction="none")
        return losses.view(logits.shape[:2]).t()

    def _one(self, tokens: Tensor) -> Tensor:
        """One step of ``FeedbackTransformerKV.forward``, after ``position`` tokens."""
        stack = self.model.transformer
        if self.position == self.size.memory_length:
            self.position = self.size.segment_length
            stack.mem_key.n = stack.mem_value.n = self.position - 1
        keys, values = stack.mem_key.get(), stack.mem_value.get()
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

    def embedding(self) -> nn.Parameter:
        return self.model.src_embed.weight

    @torch.no_grad()
    def weights_to(self, ours: nn.Module) -> None:
        source, own = self.model.state_dict(), {}
        own["embedding.tables.0"] = source["src_embed.weight"]
        own["head.tables.0"] = source["generator.weight"]
        own["head.biases.0"] = source["generator.bias"]
        own["backbone.layer_weights"] = source["transformer.weights"]
        for kind in ("weight", "bias"):
            own[f"backbone.final_norm.{kind}"] = source[f"transformer.norm.{kind}"]
        own["backbone.key.0.weight"] = source["transformer.key.linear.weight"]
        own["backbone.value.0.weight"] = source["transformer.value.linear.weight"]
        # labml's values have no bias here.
        own["backbone.value.0.bias"] = torch.zeros(self.size.d_model)
        names = {
            "query.weight": "attn.query.linear.weight",
            "output.weight": "attn.output.weight",
            "output.bias": "attn.output.bias",
            "content_bias": "attn.query_pos_bias",
            "feed_forward.inner.weight": "feed_forward.layer1.weight",
            "feed_forward.inner.bias": "feed_forward.layer1.bias",
            "feed_forward.outer.weight": "feed_forward.layer2.weight",
            "feed_forward.outer.bias": "feed_forward.layer2.bias",
            "attention_norm.weight": "norm_self_attn.weight",
            "attention_norm.bias": "norm_self_attn.bias",
            "feed_forward_norm.weight": "norm_ff.weight",
            "feed_forward_norm.bias": "norm_ff.bias",
        }
        for n, block in enumerate(self.model.transformer.layers):
            here, there = f"backbone.layers.{n}.", f"transformer.layers.{n}."
            for mine, theirs in names.items():
                own[here + mine] = source[there + theirs]
            # The nearest distance is their last row and our first.
            rows = slice(-self.size.memory_length, None)
            own[here + "position_keys"] = block.attn.key_pos_embeddings[rows].flip(0)
            own[here + "position_scores"] = block.attn.key_pos_bias[rows].flip(0)
        ours.load_state_dict(own)
