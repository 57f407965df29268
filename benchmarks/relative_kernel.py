"""Triton programs of relative attention, proven without a GPU.

    python benchmarks/relative_kernel.py shapes --shapes 100        # in Triton's interpreter
    python benchmarks/relative_kernel.py campaign                   # 10,000 of them, an hour
    python benchmarks/relative_kernel.py operator                   # opcheck, a graph, a model
    python benchmarks/relative_kernel.py targets                    # compiled: registers, spills

``shapes``, ``campaign``: random shapes, widths, limits and tiles; results and every gradient against
the reference in float64. Inputs are views inside storage full of NaN, and what is written begins as
NaN, with margins that must stay so. ``targets``: each program with its default tiles, for GPUs that
need not be here. The status is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memspan
from memspan.ops.relative import Positions, relative_attention
from triton_proofs import (
    TARGETS,
    Outputs,
    campaign,
    compare_shapes,
    instead,
    print_compiled,
    report,
    seeded,
    verbs_of,
)

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The largest difference from float64, as a part of the largest number of a tensor or of 1."""
WIDTHS = (8, 16, 24, 32, 33, 48, 64, 80, 96, 128)
SMALL_WIDTHS = WIDTHS[:5]
PROGRAMS = Path(memspan.__file__).parent / "ops" / "relative_kernel" / "kernel.py"
MARGIN = 3
IN_BUNDLES = ("80", "90", "gfx942")
FAR = 1 << 29
"""Integers that must not be read."""


# ----- In the interpreter


def guarded(t: Tensor) -> Tensor:
    """``t`` as a view inside storage of NaN, or of integers far away."""
    storage = t.new_full(
        [n + 2 * MARGIN for n in t.shape], torch.nan if t.is_floating_point() else FAR
    )
    view = storage[tuple(slice(MARGIN, MARGIN + n) for n in t.shape)]
    view.copy_(t.detach())
    return view


def apart(t: Tensor) -> Tensor:
    """``t``, contiguous, between margins of NaN."""
    storage = t.new_full((t.numel() + 2 * 64,), torch.nan)
    return storage[64:-64].view(t.shape).copy_(t)


def limits(
    draw: random.Random, batch: int, n_queries: int, n_keys: int, future: int
) -> tuple[Tensor, Tensor]:
    """First and last keys ``[B or 1, T]``: the past and so many keys of the future, cut by a span,
    memory's empty slots, documents."""
    slots = n_keys - n_queries
    rows = draw.choice([1, batch])
    query = torch.arange(slots, n_keys).expand(rows, -1)
    last = (query + draw.choice([future, draw.randint(0, future)])).clamp(max=n_keys - 1)
    first = torch.zeros_like(last)
    if draw.random() < 0.5:
        first = (query - draw.randint(0, n_keys)).clamp(min=0)
    if draw.random() < 0.5:
        valid = torch.tensor([draw.randint(0, slots) for _ in range(rows)])
        first = first.maximum(slots - valid[:, None])
    if draw.random() < 0.5:
        starts = torch.rand(rows, n_queries, generator=seeded(draw)) < 0.1
        number = starts.cumsum(1)
        document = torch.where(starts, query, 0).cummax(1).values
        first = first.maximum(document)
        # The last token of each one's document.
        ends = torch.searchsorted(number, number, right=True) - 1 + slots
        last = last.minimum(ends)
    return first.int(), last.int().contiguous()


def compare(draw: random.Random, small: bool) -> dict[str, Any]:
    """One random shape: its type, and the largest difference of any tensor. Small ones have up to three
    tiles of the smallest size to a side."""
    from memspan.ops.relative_kernel import launch

    dtype = draw.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
    most = 2 if small else 3
    longest = 36 if small else 90
    widths = SMALL_WIDTHS if small else WIDTHS
    sides = [16, 16, 32] if small else [16, 32, 64]
    batch = draw.randint(1, most)
    n_heads = draw.randint(1, most)
    n_queries = draw.choice([1, draw.randint(1, 20), draw.randint(1, longest)])
    n_keys = n_queries + draw.choice([0, 1, draw.randint(0, longest)])
    future = draw.choice([0, 0, n_queries - 1, draw.randint(0, n_queries - 1)])
    width = draw.choice(widths)
    value_width = draw.choice([width, width, draw.choice(widths)])
    tiles = launch.Plan(*(launch.Tiles(draw.choice(sides), draw.choice(sides)) for _ in range(3)))
    shapes = {
        "q": (batch, n_heads, n_queries, width),
        "k": (batch, n_heads, n_keys, width),
        "v": (batch, n_heads, n_keys, value_width),
        "keys": (n_heads, n_keys + future, width),
        "scores": (n_heads, n_keys + future),
        "d_out": (batch, n_heads, n_queries, value_width),
    }
    generator = seeded(draw)
    given = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    first, last = limits(draw, batch, n_queries, n_keys, future)
    exact = {name: t.double().requires_grad_() for name, t in given.items()}
    d_out = exact.pop("d_out").detach()
    q, k, v, keys, scores = exact.values()
    seen = launch.Limits(first, last)
    out = relative_attention(
        q, k, v, Positions(keys, scores), mask=seen, implementation="reference"
    )
    expected = (out, *torch.autograd.grad(out, list(exact.values()), d_out))

    inputs = {name: guarded(t) for name, t in given.items()}
    d_out = inputs.pop("d_out")
    leaves = [t.requires_grad_() for t in inputs.values()]
    outputs = Outputs()
    # Blocks of some heads, of some rows of one head, or of everything.
    programs = draw.choice([1, draw.randint(1, 12), 256])
    term = launch.Inputs.position_term
    with (
        instead(launch, empty=outputs.empty, plan=lambda *_: tiles, PROGRAMS=programs),
        instead(launch.Inputs, position_term=lambda given: apart(term(given))),
    ):
        out = launch.Attention.apply(*leaves, guarded(first), guarded(last))
        found = (out, *torch.autograd.grad(out, leaves, d_out))
    outputs.check()
    differences = {
        name: ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for name, a, b in zip(("out", *inputs), found, expected, strict=True)
    }
    case = {**shapes, "dtype": str(dtype), "tiles": [t[:2] for t in tiles]}
    worst = max(differences.values())
    # NaN is not below the limit.
    assert worst < LIMIT[dtype], f"{case} differs: {differences}"
    return {"dtype": str(dtype).removeprefix("torch."), "worst": worst}


# ----- As an operator, and in a model


def operator() -> None:
    """Check the operator as ``torch.compile`` asks, a graph of it, and a model that uses it."""
    from torch.library import opcheck

    from memspan.models import LanguageModel
    from memspan.models.transformer_xl.config import TransformerXLConfig
    from memspan.ops.relative_kernel import launch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    batch = 2
    n_heads = 2
    n_queries = 5
    n_keys = 8
    future = 4
    width = 16
    first = torch.zeros(1, n_queries, dtype=torch.int32)
    limits = launch.Limits(first, first + n_keys - 1)
    leaves = [
        torch.randn(shape, requires_grad=True)
        for shape in (
            (batch, n_heads, n_queries, width),
            (batch, n_heads, n_keys, width),
            (batch, n_heads, n_keys, width),
            (n_heads, n_keys + future, width),
            (n_heads, n_keys + future),
        )
    ]
    opcheck(launch.operation, (*leaves, *limits))
    checked = ["opcheck"]

    def run(*given: Tensor) -> Tensor:
        q, k, v, *positions = given
        return relative_attention(
            q, k, v, Positions(*positions), mask=limits, implementation="triton"
        )

    numbers = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        numbers.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*numbers)
    checked.append("graph")

    config = TransformerXLConfig(n_layers=2, d_model=32, n_heads=2, d_ff=32, memory_length=4)
    model = LanguageModel(11, config)
    tokens = torch.randint(11, (2, 7))
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[1, 4] = True
    lengths = torch.tensor([5, 7])
    memory = model(tokens, lengths=lengths).memory
    numbers = []
    for name in ("reference", "triton"):
        output = model(tokens, memory, targets=tokens, starts=starts, implementation=name)
        gradients = torch.autograd.grad(output.loss, list(model.parameters()), retain_graph=True)
        numbers.append([output.losses, output.memory.hidden, *gradients])
    torch.testing.assert_close(*numbers, atol=1e-5, rtol=1e-4)
    checked.append("model")
    print(json.dumps({"checked": checked}))


# ----- Compiled for GPUs


def compiled(name: str, dtype: torch.dtype, width: int, target: tuple[Any, ...]) -> dict[str, Any]:
    """Bytes of shared memory, registers of a thread and those that are spilled, as the compiler reports
    them of a program with its default tiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memspan.ops.relative_kernel import kernel, launch

    program = getattr(kernel, name)
    kind = "*fp32" if dtype == torch.float32 else "*bf16"
    tiles = getattr(launch.plan(dtype, width), name)
    shape = launch.Shape(8, 16, 512, 1024, width, width)
    constants = shape.constants(tiles, dtype)
    options = {each: constants.pop(each) for each in ("num_warps", "num_stages")}
    signature = {}
    attributes = {}
    for index, argument in enumerate(program.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("first", "last", "begin_query", "end_query"):
            signature[argument] = "*i32"
        elif argument in ("totals", "inner"):
            signature[argument] = "*fp32"
        elif argument.startswith("scale"):
            signature[argument] = "fp32"
        elif argument.startswith("n_") or argument.endswith(("_batch", "_head", "_row")):
            signature[argument] = "i32"
        else:
            signature[argument] = kind
        strides = ("_batch", "_head", "_row", "n_distances")
        if signature[argument].startswith("*") or argument.endswith(strides):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget(*target), options=options)
    row = {"program": name, "width": width, "tiles": list(tiles)}
    return row | report(result, dtype, target)


def targets(widths: list[int], only: list[str]) -> None:
    """Compile every program for every target and print a line for each."""
    names = ("forward", "backward_queries", "backward_keys")
    print_compiled(compiled, names, widths, only)


class Elsewhere:
    """A driver of Triton's for a GPU that is not here: programs are compiled and not launched."""

    def __init__(self, target: tuple[Any, ...]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(*target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A program that is compiled where it would be launched."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.program.warmup, grid=grid)


def cache(folder: Path, only: list[str]) -> None:
    """Fill a cache of Triton's with the programs of the sizes that gpu.py measures, compiled as a
    launch on each target would ask for them."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    from triton.runtime import driver

    from memspan.ops.relative_kernel import kernel, launch
    from on_gpu.attention import SIZES

    names = ("forward", "backward_queries", "backward_keys")
    programs = {name: getattr(kernel, name) for name in names}
    for target in TARGETS:
        if str(target[1]) not in (only or IN_BUNDLES):
            continue
        driver.set_active(Elsewhere(target))
        for program in programs.values():
            program.device_caches.clear()
        with instead(kernel, **{name: Compiled(program) for name, program in programs.items()}):
            for size, (batch, n_heads, n_queries, n_keys, width) in SIZES.items():
                for dtype in (torch.bfloat16, torch.float32)[: 2 if size == "small" else 1]:
                    q = torch.empty(batch, n_heads, n_queries, width, dtype=dtype, device="meta")
                    k = q.new_empty(batch, n_heads, n_keys, width)
                    table = q.new_empty(n_heads, n_keys, width)
                    first = q.new_empty(1, n_queries, dtype=torch.int32)
                    given = launch.Inputs.of(q, k, k, table, table[..., 0], first, first)
                    out, totals = launch.forward(given)
                    launch.backward(given, out, totals, out)
        print(f"compiled for {target[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = verbs_of(parser)
    verbs.add_parser("operator", help="check the operator, a graph and a model, interpreted")
    verb = verbs.add_parser("cache", help="fill a cache of Triton's with compiled programs")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--only", nargs="+", default=[], metavar="TARGET", help="80, 90, 100, gfx942")
    verb = verbs.add_parser("targets", help="compile for GPUs")
    verb.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    verb.add_argument("--only", nargs="+", default=[], metavar="TARGET", help="80, 90, 100, gfx942")
    given = parser.parse_args()
    if given.verb == "shapes":
        compare_shapes(compare, given)
    elif given.verb == "campaign":
        campaign(compare, PROGRAMS, given)
    elif given.verb == "cache":
        cache(given.folder, given.only)
    elif given.verb == "operator":
        os.environ["TRITON_INTERPRET"] = "1"
        operator()
    else:
        targets(given.widths, given.only)


if __name__ == "__main__":
    sys.exit(main())
