"""How much faster than labml training could be if everything but its matrix products were free.

Both sides compute the same function, so both need these products. They are recorded from one step of
ours and replayed alone: no bias, no activation, results written to memory that is already allocated. In
every round the products, our step and labml's take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peers.registry import SIZES, side_class
from timing import interleaved, ratio, write
from works import prepared

aten = torch.ops.aten
# The product, and which of its arguments are the factors.
PRODUCTS = {
    aten.mm.default: (torch.mm, 0),
    aten.addmm.default: (torch.mm, 1),
    aten.bmm.default: (torch.bmm, 0),
    aten.baddbmm.default: (torch.bmm, 1),
    aten.baddbmm_.default: (torch.bmm, 1),
}
MEASURED = [
    *(("fast-weights", name) for name in ("T64", "T256", "T1024")),
    *(("transformer-xl", name) for name in ("S", "M")),
]


class Recorded(TorchDispatchMode):
    """Records the matrix products of the calls inside it, as calls that compute them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Callable[[], object]] = []
        self.operations = 0
        """Multiplications and additions of all of them."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in PRODUCTS:
            product, first = PRODUCTS[function]
            a, b = (_like(t) for t in args[first : first + 2])
            out = torch.zeros_like(result)
            self.products.append(lambda: product(a, b, out=out))
            self.operations += 2 * result.numel() * a.shape[-1]
        return result

    def __call__(self) -> None:
        for product in self.products:
            product()


def _like(factor: Tensor) -> Tensor:
    """Another matrix with the same memory layout."""
    return torch.empty_strided(factor.shape, factor.stride(), dtype=factor.dtype).normal_()


def measure(architecture: str, size_name: str, rounds: int) -> dict[str, object]:
    size = SIZES[architecture][size_name]
    sides = {name: side_class(architecture, name)(size) for name in ("memspan", "labml")}
    calls = {name: prepared(side, "train") for name, side in sides.items()}
    with Recorded() as recorded:
        calls["memspan"]()
    times = interleaved({"products": recorded, **calls}, rounds)
    seconds = {name: median(values) for name, values in times.items()}
    return {
        "architecture": architecture,
        "size": size_name,
        "rounds": len(times["products"]),
        "gflops": round(recorded.operations / seconds["products"] / 1e9, 1),
        "share": round(ratio(times["products"], times["memspan"]).middle, 3),
        "ratio": round(ratio(times["labml"], times["memspan"]).middle, 2),
        "at_most": round(ratio(times["labml"], times["products"]).middle, 2),
        "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).resolve().parent / "results" / "matrix-products.json",
        metavar="PATH",
        help="where the rows go (default: benchmarks/results/matrix-products.json)",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    console, rows = Console(), []
    shown = Table(title="a training step and its matrix products, one thread")
    shown.add_column("architecture")
    shown.add_column("size")
    for column in ("GFLOP/s of products", "share of our step", "labml / ours", "labml / products"):
        shown.add_column(column, justify="right")
    for architecture, size in MEASURED:
        console.print(f"{architecture} {size}")
        row = measure(architecture, size, options.rounds)
        rows.append(row)
        figures = (f"{row['gflops']:.0f}", f"{row['share']:.0%}", row["ratio"], row["at_most"])
        shown.add_row(architecture, size, *map(str, figures))
    Console(width=None if console.is_terminal else 130).print(shown)
    write(options.json, rows)
    console.print(f"written: {options.json}")


if __name__ == "__main__":
    main()
