"""labml-nn's annotated Transformer-XL, with the memory update of its experiment."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.ours import Ours
from peers.sizes import VOCAB, Size

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.xl import TransformerXL, TransformerXLLayer
    from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention

PEER = "labml"


class Labml(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        layer = TransformerXLLayer(
            d_model=size.d_model,
            self_attn=RelativeMultiHeadAttention(size.n_heads, size.d_model, 0.0),
            feed_forward=FeedForward(size.d_model, size.d_ff, 0.0),
            dropout_prob=0.0,
        )
        self.embed = nn.Embedding(VOCAB, size.d_model)
        self.xl = TransformerXL(layer, size.n_layers)
        self.generate_head = nn.Linear(size.d_model, VOCAB)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def full_memory(self, batch: int) -> list[Tensor]:
        size = self.size
        return [torch.zeros(size.memory, batch, size.d_model) for _ in range(size.n_layers)]

    def forward(self, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Time-major ``tokens [T, B]``; logits ``[T, B, V]`` and the merged memory."""
        n = len(tokens)
        mask = torch.cat([torch.ones(n, len(memory[0])), torch.ones(n, n).tril()], 1)
        hidden, new = self.xl(self.embed(tokens), memory, mask.bool().unsqueeze(-1))
        with torch.no_grad():
            merged = [
                torch.cat([old, h])[-self.size.memory :].detach()
                for old, h in zip(memory, new, strict=True)
            ]
        return self.generate_head(hidden), merged

    def trainer(self, tokens: Tensor, targets: Tensor):
        tokens, targets = tokens.t().contiguous(), targets.t().contiguous()
        memory = self.full_memory(self.size.batch)

        def step() -> None:
            nonlocal memory
            self.train()
            logits, memory = self(tokens, memory)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return step

    def evaluator(self, tokens: Tensor, targets: Tensor):
        self.eval()
        tokens, targets = tokens.t().contiguous(), targets.t().contiguous()
        memory = self.full_memory(self.size.batch)

        def step() -> Tensor:
            nonlocal memory
            with torch.no_grad():
                logits, memory = self(tokens, memory)
                return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

        return step

    def generator(self, batch: int):
        self.eval()
        memory = self.full_memory(batch)
        token = torch.zeros(1, batch, dtype=torch.long)

        def step() -> Tensor:
            nonlocal memory
            with torch.no_grad():
                logits, memory = self(token, memory)
                return logits

        return step


def make(size: Size, ours: Ours) -> Labml:
    """labml's model with our weights, after checking that both compute the same numbers."""
    peer = Labml(size)
    model, state = ours.model, {}
    state["embed.weight"] = model.embedding.tables[0]
    state["generate_head.weight"] = model.head.tables[0]
    state["generate_head.bias"] = model.head.biases[0]
    state["xl.norm.weight"] = model.backbone.final_norm.weight
    state["xl.norm.bias"] = model.backbone.final_norm.bias
    for n, layer in enumerate(model.backbone.layers):
        a, f, p = layer.attention, layer.feed_forward, f"xl.layers.{n}."
        state[p + "self_attn.query.linear.weight"] = a.query.weight
        state[p + "self_attn.key.linear.weight"] = a.key.weight
        state[p + "self_attn.value.linear.weight"] = a.value.weight
        state[p + "self_attn.value.linear.bias"] = a.value.bias
        state[p + "self_attn.output.weight"] = a.output.weight
        state[p + "self_attn.output.bias"] = a.output.bias
        state[p + "self_attn.query_pos_bias"] = model.backbone.content_bias[n]
        state[p + "feed_forward.layer1.weight"] = f.inner.weight
        state[p + "feed_forward.layer1.bias"] = f.inner.bias
        state[p + "feed_forward.layer2.weight"] = f.outer.weight
        state[p + "feed_forward.layer2.bias"] = f.outer.bias
        for theirs, mine in (("self_attn", "attention"), ("ff", "feed_forward")):
            norm = getattr(layer, f"{mine}_norm")
            state[p + f"norm_{theirs}.weight"] = norm.weight
            state[p + f"norm_{theirs}.bias"] = norm.bias
        # Its tables have a row per distance, counted down from the row of distance 0.
        attention = peer.xl.layers[n].self_attn
        rows = len(a.position_keys)
        keys = attention.key_pos_embeddings.detach().clone()
        scores = attention.key_pos_bias.detach().clone()
        keys[attention.P - rows + 1 : attention.P + 1] = a.position_keys.detach().flip(0)
        scores[attention.P - rows + 1 : attention.P + 1] = a.position_scores.detach().flip(0)
        state[p + "self_attn.key_pos_embeddings"] = keys
        state[p + "self_attn.key_pos_bias"] = scores
    missing = set(peer.state_dict()) - set(state)
    assert not missing, f"not mapped: {missing}"
    peer.load_state_dict(state)
    check(peer, ours)
    return peer


@torch.no_grad()
def check(peer: Labml, ours: Ours) -> None:
    """Three segments, logits within 1e-4: no speed is reported where the numbers differ."""
    size = ours.size
    memory, theirs = ours.full_memory(2), peer.full_memory(2)
    ours.model.eval()
    peer.eval()
    reader = ours.model.reader(memory)
    for _ in range(3):
        tokens = torch.randint(VOCAB, (2, size.segment))
        out = ours.model(tokens, memory)
        memory = out.memory
        logits, theirs = peer(tokens.t(), theirs)
        for mine in (out.logits, reader.read(tokens)):
            worst = (mine.transpose(0, 1) - logits).abs().max().item()
            assert worst < 1e-4, f"logits differ by {worst}: no timing"
