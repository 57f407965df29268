"""Record the authors' Recurrent Memory Transformer and its associative successor around GPT-NeoX.

GPT-NeoX of transformers, with sequential residuals, no biases in attention and rotary positions of the
whole width, is what :class:`memspan.models.Transformer` computes. The authors' modules are run from
their repositories; what newer versions of transformers return is turned into what they expect.

    git clone https://github.com/booydar/recurrent-memory-transformer rmt
    git clone https://github.com/RodkinIvan/associative-recurrent-memory-transformer armt
    python tests/recorded/from_rmt.py rmt armt tests/recorded/rmt
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
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

B = 2
BLOCK = 5
T = 3 * BLOCK + 3
"""Three blocks and a part of the fourth."""
TOKENS = 4
D_MEMORY = 4
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 7,
}
REPOSITORIES = {
    "tokens": ("booydar/recurrent-memory-transformer", "modeling_rmt/language_modeling.py"),
    "associative": (
        "RodkinIvan/associative-recurrent-memory-transformer",
        "modeling_amt/language_modeling.py",
    ),
}


class Rotary(nn.Module):
    """The base model's angles, in the type that it computes in; its own are in float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = SIZES["hidden_size"] // SIZES["num_attention_heads"]
        steps = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = position_ids[..., None].double() * 10000.0**-steps
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class InTuple(nn.Module):
    """A layer that returns a tuple, as all did."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
        return (self.layer(hidden_states, **kwargs),)


def base(activation: str) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        **SIZES,
        hidden_act=activation,
        attention_bias=False,
        use_parallel_residual=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # The other one has softmax in float32.
        attn_implementation="sdpa",
    )
    model = GPTNeoXForCausalLM(config)
    model.gpt_neox.rotary_emb = Rotary()
    return model


def module_of(tree: Path, name: str) -> ModuleType:
    """The authors' module. A tracker that it imports and does not use need not be there."""
    sys.modules.setdefault("wandb", ModuleType("wandb"))
    found = ModuleType(name)
    file = tree / REPOSITORIES[name][1]
    exec(compile(file.read_text(), str(file), "exec"), found.__dict__)
    return found


def wrapped(tree: Path, name: str) -> tuple[nn.Module, nn.Module]:
    """The authors' wrapper, and the cell in it that reads a segment."""
    authors = module_of(tree, name)
    if name == "tokens":
        cell = authors.MemoryCell(base("relu"), TOKENS)
        return authors.RecurrentWrapper(cell, segment_size=BLOCK), cell
    cell = authors.AssociativeMemoryCell(
        base("gelu"), TOKENS, D_MEMORY, layers_attr="gpt_neox.layers", wrap_pos=False
    )
    for layer in cell.layers:
        layer.layer = InTuple(layer.layer)
        layer.register_forward_hook(lambda _, __, out: out[0])
    return authors.AssociativeRecurrentWrapper(cell, segment_size=BLOCK), cell


def record(tree: Path, out: Path, name: str) -> None:
    """Write ``NAME.safetensors`` and ``NAME.json``."""
    torch.manual_seed(49)
    model, cell = wrapped(tree, name)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            gain = each.endswith("weight") and "norm" in each
            parameter.copy_(1 + 0.3 * noise if gain else 0.4 * noise)
    kept = {each: p.detach().clone() for each, p in model.named_parameters()}
    width = SIZES["hidden_size"]
    given = {"x": torch.randn(B, T, width), "w": torch.randn(B, T, width)}
    memories: list[dict[str, Tensor]] = []

    def after_a_segment(_: nn.Module, __: Any, output: Any) -> None:
        if name == "tokens":
            memories.append({"memory": output[1]})
        else:
            layers = list(cell.layers)
            memories.append(
                {
                    "weights": torch.stack([layer.W_mem for layer in layers], 1),
                    "key_sum": torch.stack([layer.z for layer in layers], 1),
                }
            )

    cell.register_forward_hook(after_a_segment)
    model.double()
    x = given["x"].double().requires_grad_()
    ids = torch.zeros(B, T, dtype=torch.long)
    output = model(ids, inputs_embeds=x, output_hidden_states=True)
    hidden = output.hidden_states[-1]
    assert torch.allclose(cell.model.get_output_embeddings()(hidden), output.logits), (
        "not the last hidden state"
    )
    loss = (hidden * given["w"]).sum()
    named = dict(model.named_parameters())
    leaves = [x, *named.values()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    found = {"out": hidden, "loss": loss, "gradin.x": gradients[0]}
    trained = {}
    for each, gradient in zip(named, gradients[1:], strict=True):
        if gradient is not None:
            found[f"grad.{each}"] = gradient
            trained[each] = kept[each]
    for n, memory in enumerate(memories[: T // BLOCK]):
        found |= {f"seg{n}.{kind}": tensor for kind, tensor in memory.items()}
    tensors = {f"in.{each}": t.contiguous() for each, t in given.items()}
    tensors |= {f"param.{each}": t.contiguous() for each, t in trained.items()}
    tensors |= {f"f64.{each}": t.detach().contiguous() for each, t in found.items()}
    save_file(tensors, out / f"{name}.safetensors")
    repository, file = REPOSITORIES[name]
    commit = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    about = {
        "set": out.name,
        "name": name,
        "file": f"{name}.safetensors",
        "peer": {
            "repo": repository,
            "commit": commit.stdout.strip(),
            "file": file,
            "class": type(model).__name__,
        },
        "what": "Vectors in, last hidden state out, by segments; around transformers' GPT-NeoX",
        "config": {
            "cls": name,
            "B": B,
            "T": T,
            "block_length": BLOCK,
            "memory_tokens": TOKENS,
            "d_memory": D_MEMORY,
            "activation": "relu" if name == "tokens" else "gelu",
            "segments": [BLOCK] * (T // BLOCK),
            **SIZES,
        },
        "tied_parameters": [],
        "parameters_without_gradient": [],
    }
    (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    *trees, target = map(Path, sys.argv[1:])
    target.mkdir(exist_ok=True)
    for source, case in zip(trees, REPOSITORIES, strict=True):
        record(source, target, case)
