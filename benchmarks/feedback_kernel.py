"""Triton programs of the Feedback Transformer, proven without a GPU.

    python benchmarks/feedback_kernel.py shapes --shapes 100        # in Triton's interpreter
    python benchmarks/feedback_kernel.py campaign                   # 10,000 of them, an hour
    python benchmarks/feedback_kernel.py targets                    # compiled: registers, spills

``shapes``, ``campaign``: models of random sizes and options, with memories, documents and dropout;
results and every gradient against the reference in float64. What the programs read lies inside storage
full of NaN, and what they write begins as NaN, with margins that must stay so. ``targets``: each
program with its default tiles, for GPUs that need not be here. The status is 1 where something is
wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memspan
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.feedback.model import Feedback, FeedbackMemory
from memspan.ops.feedback import programs, recurrence
from memspan.ops.feedback.buffers import Buffers
from triton_proofs import (
    Outputs,
    campaign,
    compare_shapes,
    instead,
    print_compiled,
    report,
    seeded,
    verbs_of,
)

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""The largest difference from float64, as a part of the largest number of a tensor or of 1."""
PROGRAMS = Path(memspan.__file__).parent / "ops" / "feedback" / "triton_kernel.py"
SIZES = {
    "small": {"d_model": 128, "d_ff": 512, "n_heads": 4, "width": 32},
    "large": {"d_model": 512, "d_ff": 2048, "n_heads": 8, "width": 64},
}


# ----- In the interpreter


class Guarded(Outputs):
    """Storage for all that the programs are given."""

    def copy(self, t: Tensor) -> Tensor:
        return self.empty(t, *t.shape).copy_(t) if t.is_floating_point() else t

    def new_slots(self, like: Tensor, *sizes: int) -> Tensor:
        return self.empty(like, 2, *sizes)

    def totals(self, like: Tensor, *sizes: int) -> Tensor:
        return self.empty(like, *sizes, dtype=torch.float32)

    def new_buffers(self, *given: Any) -> Buffers:
        made = BUFFERS(*given)
        # Other loops fill these.
        left = {name: made.pop(name) for name in ("moments", "probabilities")}
        guarded = {name: self.empty(t, *t.shape) for name, t in made.items()}
        guarded["attended"][..., -1] = guarded["activated"][..., -1] = 1
        return guarded | left

    def new_gradients(self, b: Buffers, *given: Tensor) -> Buffers:
        made = GRADIENTS(b, *given)
        guarded = {name: self.empty(t, *t.shape) for name, t in made.items()}
        for name in ("d_position_keys", "d_position_scores", "d_kv", "d_vectors"):
            guarded[name].copy_(made[name])
        guarded["d_streams"][-1] = made["d_streams"][-1]
        if made["d_added"].data_ptr() == made["d_streams"][1:].data_ptr():
            self._storages.pop(list(made).index("d_added") - len(made))
            guarded["d_added"] = guarded["d_streams"][1:]
        return guarded


BUFFERS = recurrence.new_buffers
GRADIENTS = recurrence.new_gradients


def drawn_model(draw: random.Random, dtype: torch.dtype, small: bool) -> Feedback:
    """A model of random sizes and options in float64; its numbers fit into bfloat16."""
    most = 2 if small else 3
    # Rounded to bfloat16, a sum near zero may change its sign, and a ReLU then has another gradient.
    activations = ["gelu"] if dtype == torch.bfloat16 else ["relu", "gelu"]
    post = draw.random() < 0.3
    span = draw.randint(1, 6 if small else 12)
    config = FeedbackConfig(
        n_layers=draw.choice([1, 1, most]),
        d_model=draw.choice([8, 16, 24] if small else [8, 24, 33, 64]),
        n_heads=draw.randint(1, most),
        d_head=draw.choice([4, 8, 16] if small else [4, 8, 16, 24, 33]),
        d_ff=draw.choice([8, 20] if small else [8, 40, 70]),
        memory_length=span,
        max_distance=span + draw.choice([0, 3]),
        projections=draw.choice(["shared", "per-layer"]),
        memory_vector=draw.choice(["learned", "last", "mean"]),
        normalisation="post" if post else "pre",
        memory_norm=draw.random() < 0.7,
        activation=draw.choice(activations),
        attention_bias=draw.random() < 0.5,
        dropout=draw.choice([0, 0, 0.3]),
        attention_dropout=draw.choice([0, 0, 0.3]),
    )
    generator = seeded(draw)
    # Of what the model draws itself.
    torch.manual_seed(draw.getrandbits(40))
    model = Feedback(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = name.endswith("weight") and "norm" in name
            parameter.copy_(1 + 0.3 * noise if gain else parameter + 0.1 * noise)
    return model.bfloat16().double()


def read(
    model: Feedback, x: Tensor, memory: FeedbackMemory, implementation: str, **documents: Any
) -> dict[str, Tensor]:
    """Outputs, memory vectors, and gradients of a function of both whose weights are the same for all
    types."""
    dtype = next(model.parameters()).dtype
    x = x.to(dtype).requires_grad_()
    old = memory.vectors.to(dtype).requires_grad_()
    memory = FeedbackMemory(memory.tokens_seen, old, memory.length)
    # Dropout draws the same.
    torch.manual_seed(0)
    out = model(x, memory, implementation=implementation, **documents)
    generator = torch.Generator().manual_seed(1)
    results = (out.hidden, out.memory.vectors)
    upstream = [torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype) for t in results]
    named = dict(model.named_parameters()) | {"x": x, "old": old}
    gradients = torch.autograd.grad(results, list(named.values()), upstream, allow_unused=True)
    found = {"hidden": out.hidden, "vectors": out.memory.vectors}
    return found | {
        f"gradient of {name}": g for name, g in zip(named, gradients, strict=True) if g is not None
    }


def compare(draw: random.Random, small: bool) -> dict[str, Any]:
    """One random model and segment: its type, and the largest difference of any tensor. Small ones have
    few tiles."""
    dtype = draw.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
    model = drawn_model(draw, dtype, small)
    config = model.config
    rows = draw.choice([1, 1, 2])
    n_tokens = draw.choice([1, 2] if small else [1, draw.randint(2, 5)])
    generator = seeded(draw)
    x = torch.randn(rows, n_tokens, config.d_model, generator=generator).bfloat16()
    memory = model.initial_memory(rows)
    if draw.random() < 0.7:
        length = torch.tensor([draw.randint(0, config.memory_length) for _ in range(rows)])
        vectors = torch.randn(memory.vectors.shape, generator=generator).bfloat16()
        used = torch.arange(config.memory_length) >= config.memory_length - length[:, None]
        memory = FeedbackMemory(length, (vectors * used[..., None]).double(), length)
    documents = {}
    if draw.random() < 0.3:
        documents["starts"] = torch.rand(rows, n_tokens, generator=generator) < 0.3
    expected = read(model, x, memory, "reference", **documents)
    tiles = programs.Tiles(
        draw.choice([16, 32, 64]), draw.choice([16, 32, 64]), draw.choice([16, 32])
    )
    guarded = Guarded()
    with (
        instead(programs, TILES=tiles, empty=guarded.totals, new_slots=guarded.new_slots),
        instead(programs, laid_out=lambda t: laid_out(guarded, t)),
        instead(recurrence, new_buffers=guarded.new_buffers, new_gradients=guarded.new_gradients),
    ):
        found = read(model.to(dtype), x, memory, "triton", **documents)
    guarded.check()
    differences = differences_from(expected, found)
    worst = max(differences, key=lambda name: differences[name])
    # NaN is not below the limit.
    assert all(each < LIMIT[dtype] for each in differences.values()), (
        f"{config} with {tiles}, {rows} rows of {n_tokens} tokens, {dtype}: {differences}"
    )
    return {"dtype": str(dtype).removeprefix("torch."), "worst": differences[worst], "of": worst}


def differences_from(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each tensor, as a part of its largest number or of 1."""
    return {
        name: ((found[name] - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for name, b in expected.items()
    }


LAID_OUT = programs.laid_out


def laid_out(guarded: Guarded, t: Tensor) -> Tensor:
    """Weights are copied to guarded storage; all else lies there already, and may be written to."""
    plain = LAID_OUT(t)
    storages = {storage.data_ptr() for storage in guarded._storages}
    return plain if t.untyped_storage().data_ptr() in storages else guarded.copy(plain)


# ----- Compiled for GPUs


def compiled(name: str, dtype: torch.dtype, size: str, target: tuple[Any, ...]) -> dict[str, Any]:
    """Bytes of shared memory, registers of a thread and those that are spilled, as the compiler reports
    them of a program with its default tiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memspan.ops.feedback import triton_kernel

    program = getattr(triton_kernel, name)
    sizes = programs.Sizes(
        **SIZES[size], n_layers=4, groups=1, post_norm=False, gelu=False, norms_memory=True,
        sees_part=True, drops_weights=True, drops=True,
    )  # fmt: skip
    tiles = programs.TILES
    of_row = name in ("forward", "backward")
    constants = sizes.constants(tiles) if of_row else sizes.position_constants(tiles)
    options = {each: constants.pop(each) for each in ("num_warps", "num_stages")}
    kind = "*fp32" if dtype == torch.float32 else "*bf16"
    kinds = {"visible": "*i64", "totals": "*fp32", "d_scores": "*fp32"}
    kinds |= dict.fromkeys(("n_steps", "batch", "n_old", "span", "n_kept"), "i32")
    kinds |= dict.fromkeys(("eps", "weights_scale", "scale"), "fp32")
    signature = {}
    attributes = {}
    for index, argument in enumerate(program.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        kept = "*u8" if argument.startswith("kept_") else kind
        signature[argument] = kinds.get(argument, kept)
        if signature[argument].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget(*target), options=options)
    return {"program": name, "size": size} | report(result, dtype, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = verbs_of(parser)
    verb = verbs.add_parser("targets", help="compile for GPUs")
    verb.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    verb.add_argument("--only", nargs="+", default=[], metavar="TARGET", help="80, 90, 100, gfx942")
    given = parser.parse_args()
    if given.verb == "shapes":
        compare_shapes(compare, given)
    elif given.verb == "campaign":
        campaign(compare, PROGRAMS, given)
    else:
        names = ("forward", "backward", "position_gradients")
        print_compiled(compiled, names, given.sizes, given.only)


if __name__ == "__main__":
    sys.exit(main())
