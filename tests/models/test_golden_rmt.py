"""The Recurrent Memory Transformer, and with associative memory, against the authors' code around
transformers' GPT-NeoX: outputs, memory after each block, every gradient, however the text is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from golden import in_both_precisions, parameters
from memspan.models import RMTConfig

pytestmark = pytest.mark.golden

PARTS = {
    "attention.dense": "output",
    "mlp.dense_h_to_4h": "feed_forward.inner",
    "mlp.dense_4h_to_h": "feed_forward.outer",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}
ASSOCIATIVE = {"W_mq": "query", "W_mk": "key", "W_mv": "value", "W_mb": "beta"}


def ours(theirs: dict[str, Tensor], n_layers: int, n_heads: int) -> dict[str, Tensor]:
    """Our parameters as functions of the peer's, by our names."""
    model = "memory_cell.model.gpt_neox"
    found = {"memory_tokens": theirs["memory_cell.memory"]}

    def take(name: str, peer: str) -> None:
        for kind in ("weight", "bias"):
            if f"{peer}.{kind}" in theirs:
                found[f"{name}.{kind}"] = theirs[f"{peer}.{kind}"]

    take("backbone.final_norm", f"{model}.final_layer_norm")
    for n in range(n_layers):
        here = f"backbone.layers.{n}"
        there = f"{model}.layers.{n}"
        for peer, name in ASSOCIATIVE.items():
            take(f"associative.{n}.{name}", f"{there}.{peer}")
        if f"{there}.W_mq.weight" in theirs:
            there += ".layer.layer"
        for peer, name in PARTS.items():
            take(f"{here}.{name}", f"{there}.{peer}")
        # Head by head: its query, its key, its value.
        heads = theirs[f"{there}.attention.query_key_value.weight"].unflatten(0, (n_heads, 3, -1))
        for name, weight in zip(("query", "key", "value"), heads.unbind(1), strict=True):
            found[f"{here}.{name}.weight"] = weight.flatten(0, 1)
    return found


@pytest.mark.parametrize("path", parameters("rmt"))
@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
def test_golden(path: Path, implementation: str) -> None:
    for g in in_both_precisions(path):
        c = g.config
        config = RMTConfig(
            n_layers=c["num_hidden_layers"],
            d_model=c["hidden_size"],
            n_heads=c["num_attention_heads"],
            d_ff=c["intermediate_size"],
            activation=c["activation"],
            block_length=c["block_length"],
            memory_tokens=c["memory_tokens"],
            associative=c["cls"] == "associative",
            d_memory=c["d_memory"],
        )
        backbone = config.build().to(g.dtype)
        for cuts in ([c["T"]], c["segments"], [7, 1, 1, 9]):
            theirs = g.leaves()
            weights = ours(theirs, config.n_layers, config.n_heads)
            assert weights.keys() == dict(backbone.named_parameters()).keys()
            x = g.input("x").requires_grad_()
            # With the part that the cuts leave over.
            lengths = [*cuts, c["T"] - sum(cuts)]
            memory = backbone.initial_memory(c["B"])
            hidden = []
            for n, part in enumerate(x.split(lengths, 1)):
                read = {"implementation": implementation}
                out = functional_call(backbone, weights, (part, memory), read)
                memory = out.memory
                hidden.append(out.hidden)
                if cuts == c["segments"] and n < len(cuts):
                    for name, tensor in memory.tensors().items():
                        g.check(f"seg{n}.{'memory' if name == 'tokens' else name}", tensor)
            g.check("out", torch.cat(hidden, 1))
            g.score("", torch.cat(hidden, 1) * g.input("w"))
            g.backward()
            g.check_gradients(theirs)
            g.check("gradin.x", x.grad)
