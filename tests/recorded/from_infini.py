"""Record the attention of lucidrains' infini-transformer-pytorch, with both of its updates.

The module's own file is run, with rotary positions in float64 in place of the package that it imports;
which entries of a head make a pair is that package's choice, here halves. It needs einops.

    git clone https://github.com/lucidrains/infini-transformer-pytorch infini
    python tests/recorded/from_infini.py infini tests/recorded/infini
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

B = 2
BLOCK = 5
BLOCKS = 4
D = 12
H = 2
K = 6
FILE = "infini_transformer_pytorch/infini_transformer.py"


class Rotary(nn.Module):
    """Stands for the package's class of this method."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def rotate_queries_with_cached_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        angles = torch.arange(k.shape[-2])[:, None] * 10000.0**-steps

        def turned(x: Tensor) -> Tensor:
            own = angles[-x.shape[-2] :]
            sine = own.sin()
            cosine = own.cos()
            a, b = x.chunk(2, -1)
            return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)

        return turned(q), turned(k)


def module_of(tree: Path) -> ModuleType:
    positions: Any = ModuleType("rotary_embedding_torch")
    positions.RotaryEmbedding = Rotary
    sys.modules["rotary_embedding_torch"] = positions
    found = ModuleType("infini_transformer")
    sys.modules[found.__name__] = found
    exec(compile((tree / FILE).read_text(), FILE, "exec"), found.__dict__)
    return found


def record(tree: Path, out: Path, update: str) -> None:
    """Write ``UPDATE.safetensors`` and ``UPDATE.json``."""
    torch.manual_seed(49)
    model = module_of(tree).CausalAttention(
        D, dim_head=K, heads=H, use_mem_delta_rule=update == "delta"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = {"x": torch.randn(B, BLOCK * BLOCKS, D), "w": torch.randn(B, BLOCK * BLOCKS, D)}
    # In the first block it leaves attention as it is, and the paper's equation takes a share of it.
    given["w"][:, :BLOCK] = 0
    model.double()
    x = given["x"].double().requires_grad_()
    memories = None
    outputs = []
    found = {}
    for n, block in enumerate(x.split(BLOCK, 1)):
        y, _, memories = model(block, past_memories=memories, return_new_memories=True)
        outputs.append(y)
        found |= {f"seg{n}.weights": memories.kv_mem, f"seg{n}.key_sum": memories.k_norm}
    found["out"] = torch.cat(outputs[1:], 1)
    found["loss"] = (torch.cat(outputs, 1) * given["w"]).sum()
    names = ["x", *kept]
    gradients = torch.autograd.grad(found["loss"], [x, *model.parameters()])
    kinds = ["gradin", *["grad"] * len(kept)]
    for kind, name, gradient in zip(kinds, names, gradients, strict=True):
        found[f"{kind}.{name}"] = gradient
    tensors = {f"in.{name}": t.contiguous() for name, t in given.items()}
    tensors |= {f"param.{name}": t.contiguous() for name, t in kept.items()}
    tensors |= {f"f64.{name}": t.detach().contiguous() for name, t in found.items()}
    save_file(tensors, out / f"{update}.safetensors")
    commit = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    about = {
        "set": out.name,
        "name": update,
        "file": f"{update}.safetensors",
        "peer": {
            "repo": "lucidrains/infini-transformer-pytorch",
            "commit": commit.stdout.strip(),
            "file": FILE,
            "class": "CausalAttention",
        },
        "what": "One attention over four segments; outputs from the second on, memories of all",
        "config": {
            "cls": update,
            "update": update,
            "B": B,
            "d_model": D,
            "n_heads": H,
            "d_head": K,
            "block_length": BLOCK,
            "segments": [BLOCK] * BLOCKS,
        },
        "tied_parameters": [],
        "parameters_without_gradient": [],
    }
    (out / f"{update}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.mkdir(exist_ok=True)
    for rule in ("linear", "delta"):
        record(source, target, rule)
