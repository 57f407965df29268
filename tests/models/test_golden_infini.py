"""Infini-attention against a public implementation, lucidrains': outputs from the second block on,
memories, every gradient, however the text is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from golden import in_both_precisions, parameters
from memspan.layers import InfiniAttention
from memspan.models import InfiniConfig

pytestmark = pytest.mark.golden


def ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters as functions of the peer's: its gate says how much of attention is taken."""
    query, key, value = theirs["to_qkv.weight"].chunk(3)
    return {
        "query.weight": query,
        "key.weight": key,
        "value.weight": value,
        "gate": -theirs["fastweight_mem.head_gates"],
        "output.weight": theirs["to_out.weight"],
    }


@pytest.mark.parametrize("implementation", ["reference", "sdpa"])
@pytest.mark.parametrize("path", parameters("infini"))
def test_golden(path: Path, implementation: str) -> None:
    """The peer's norm is put before the layer."""
    for g in in_both_precisions(path):
        c = g.config
        names = ("d_model", "n_heads", "d_head", "block_length", "update")
        layer = InfiniAttention(InfiniConfig(**{name: c[name] for name in names})).to(g.dtype)
        first = c["block_length"]
        for cuts in ([sum(c["segments"])], c["segments"], [7, 1, 1, 9, 2]):
            theirs = g.leaves()
            x = g.input("x").requires_grad_()
            z = torch.nn.functional.normalize(x, dim=-1) * c["d_model"] ** 0.5
            z = z * theirs["norm.gamma"]
            memory = layer.initial_memory(c["B"])
            outputs = []
            for n, part in enumerate(z.split(cuts, 1)):
                given = (part, memory, implementation)
                y, memory = functional_call(layer, ours(theirs), given)
                outputs.append(y)
                if cuts == c["segments"]:
                    g.check(f"seg{n}.weights", memory.weights)
                    g.check(f"seg{n}.key_sum", memory.key_sum)
            y = torch.cat(outputs, 1)
            g.check("out", y[:, first:])
            g.score("", y * g.input("w"))
            g.backward()
            g.check_gradients(theirs)
            g.check("gradin.x", x.grad)
