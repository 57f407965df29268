"""Measure what each architecture gives and costs, at one size: the tables of docs/which-one.md.

    python benchmarks/which_one.py [--rounds 7]      # measures, then writes the tables
    python benchmarks/which_one.py --page            # writes the tables from what was measured

Cost is CPU time per token, sides taking turns: of training, updates of the preset; of reading, its
segments with the losses of all tokens, eight rows; of writing, one row, one token at a time. Memories
are full.
Bytes are those of the memory that is carried and saved, for one stream. Losses come from
benchmarks/results/memory-worth.json, answers from docs/recall.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import page_tables
import timing
import trainings
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel
from shakespeare import add_text, parts, preset
from sides import Side
from timing import RESULTS, interleaved, write

PAGE = page_tables.DOCS / "which-one.md"
ROWS = 8
"""Read side by side."""
NAMES = {
    "transformer-xl": ("Transformer-XL", "transformer-xl"),
    "compressive": ("Compressive", "compressive-convolution"),
    "feedback": ("Feedback", "feedback"),
    "fast-weights": ("Fast Weights", "fast-weights-delta"),
    "gated-delta-net": ("Gated DeltaNet", "gated-delta-net"),
    "lstm": ("LSTM", "lstm"),
    "transformer": ("Transformer, no memory", "transformer"),
    "kda": ("Kimi Delta Attention", "kda"),
    "mamba-2": ("Mamba-2", "memspan-mamba-2"),
    "gla": ("GLA", "gla"),
    "delta-product": ("DeltaProduct", "delta-product"),
    "gated-delta-net-2": ("Gated DeltaNet 2", "gated-delta-net-2"),
    "rwkv-7": ("RWKV-7", "rwkv-7"),
    "infini": ("Infini-attention", "infini"),
    "rmt": ("RMT", "rmt"),
}
"""Each architecture's title, and its model in the recall experiment."""


def reach(config: Any) -> int | None:
    """Tokens that the memory stands for, where every token has its place (None: elsewhere)."""
    compressed = getattr(config, "compression_rate", 0) * getattr(config, "compressed_length", 0)
    return getattr(config, "memory_length", 0) + compressed or None


def readers(config: RunConfig[Any], text: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Time a model without training: reading a segment, writing a token."""
    model = LanguageModel(256, config.model).eval()
    length = config.train.segment_length
    segments = text[: ROWS * 8 * length].view(ROWS, -1).split(length, 1)
    many = model.reader(batch_size=ROWS)
    one = model.reader()
    for segment in segments:
        many.read(segment, targets=segment)
        one.read(segment[:1])
    segment = segments[0]
    token = segments[0][:1, :1]
    return {"read": lambda: many.read(segment, targets=segment), "write": lambda: one.read(token)}


def measure(text: Path, rounds: int) -> None:
    """Time every preset and write benchmarks/results/which-one.json."""
    torch.set_num_threads(1)
    tokens = torch.from_numpy(parts(text)[0].copy()).long()
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    n_tokens: dict[tuple[str, str], int] = {}
    sizes = {}
    for model in NAMES:
        config = preset(model)
        loop = dataclasses.replace(config.train, first_segment_length=None, curriculum_steps=0)
        backbone = config.model.for_segments(loop.segment_length)
        config = dataclasses.replace(config, train=loop, model=backbone)
        side = Side(config, text)
        # Fills the memory.
        side.train(8)
        calls[model, "train"] = side.update
        n_tokens[model, "train"] = loop.batch_size * loop.segment_length
        for work, call in readers(config, tokens).items():
            calls[model, work] = call
            n_tokens[model, work] = ROWS * loop.segment_length if work == "read" else 1
        n_bytes = side.state.model.initial_memory(1).nbytes
        sizes[model] = {"parameters": side.n_parameters, "memory_bytes": n_bytes}
        sizes[model]["reach"] = reach(config.model)
    times = interleaved(calls, rounds)
    rows = []
    for model, size in sizes.items():
        costs = {
            f"{work}_microseconds": median(times[model, work]) / n_tokens[model, work] * 1e6
            for work in ("train", "read", "write")
        }
        rows.append({"model": model, **size, **costs})
    write(RESULTS / "which-one.json", rows)


def quality(model: str) -> str | None:
    """Nats per byte on the last tenth of Tiny Shakespeare, memory carried; None: never trained."""
    wanted = {"model": model, "side": "carried", "steps": None}
    rows = trainings.rows_in(RESULTS / "memory-worth.json")
    nats = [r["nats"] for r in rows if wanted.items() <= r.items()]
    return trainings.spread(nats) if nats else None


def recalled(model: str, distance: int) -> str:
    """Right answers, in %, to questions about something so many tokens back, to half an octave."""
    rows = trainings.rows_in(page_tables.DOCS / "recall" / "recall.json")
    rows = [r for r in rows if r["panel"] == "time" and r["model"] == NAMES[model][1]]
    if not rows:
        return "not measured"
    nearest = [min(r["curve"], key=lambda point: abs(point[0] - distance))[1] for r in rows]
    return f"{100 * mean(nearest):.0f} %"


ABLE = {
    "transformer-xl": "Transformer-XL",
    "feedback": "Feedback",
    "fast-weights-delta": "Fast Weights",
    "gated-delta-net": "Gated DeltaNet",
    "gated-delta-net-negative": "Gated DeltaNet, β to 2",
    "kda": "Kimi Delta Attention",
    "gated-delta-net-2": "Gated DeltaNet 2",
    "delta-product": "DeltaProduct",
    "rwkv-7": "RWKV-7",
    "memspan-mamba-2": "Mamba-2",
    "gla": "GLA",
    "retention": "RetNet",
    "infini": "Infini-attention",
    "rmt": "RMT",
    "armt": "ARMT",
    "lstm": "LSTM",
    "transformer": "Transformer, no memory",
}
"""Models of the four tasks, and their titles."""
TASKS = {"mqar": "many keys", "parity": "parity", "s3": "S3"}


def share(values: list[float]) -> str:
    """Mean of the seeds, and their least and most, in %."""
    if not values:
        return "not tried"
    least, most = (f"{100 * end:.0f}" for end in (min(values), max(values)))
    return f"{100 * mean(values):.0f}" + (f" ({least} to {most})" if least != most else "")


def abilities() -> str:
    """A table of what small models learned of four tasks, a column for each that was tried."""
    folder = page_tables.DOCS / "recall"
    recall = [r for r in trainings.rows_in(folder / "recall.json") if r["panel"] == "today"]
    others = [r for r in trainings.rows_in(folder / "synthetic.json") if r["seed"]]
    columns: dict[str, dict[str, list[float]]] = {}
    for distance in (9, 50, 150, 1000):
        column = columns.setdefault(f"recall at {distance:,}", defaultdict(list))
        for row in recall:
            near = min(row["curve"], key=lambda point: abs(point[0] - distance))
            column[row["model"]].append(near[1])
    for row in others:
        # The longest sequences that were read.
        length, right = [*row["right"].items()][-1]
        title = f"{TASKS[row['task']]}, {length} tokens"
        columns.setdefault(title, defaultdict(list))[row["model"]].append(right)
    lines = [["right, %", *columns]]
    for model, title in ABLE.items():
        cells = [share(column[model]) for column in columns.values()]
        if {*cells} != {"not tried"}:
            lines.append([title, *cells])
    return page_tables.markdown(lines)


def tables() -> dict[str, str]:
    """The page's tables, a row for each architecture: what it gives, what it costs, what it can."""
    measured = json.loads((RESULTS / "which-one.json").read_text())
    gives = [["gives", "nats per byte", "recall at 50", "at 150", "at 1,000 tokens"]]
    costs = [["costs", "train, µs/token", "read", "write", "memory", "per token in it"]]
    for row in measured["rows"]:
        name = NAMES[row["model"]][0]
        reached = row["reach"]
        n_bytes = row["memory_bytes"]
        if nats := quality(row["model"]):
            right = [recalled(row["model"], distance) for distance in (50, 150, 1000)]
            gives.append([name, nats, *right])
        times = [f"{row[f'{work}_microseconds']:,.0f}" for work in ("train", "read", "write")]
        per_token = f"{n_bytes / reached:,.0f} B" if reached else "no places"
        costs.append([name, *times, f"{n_bytes / 1024:,.1f} KiB", per_token])
    where = measured["machine"]
    ran_on = f"Costs: one core of an {where['cpu']}, {where['capability']}, {where['date']}."
    parts = (page_tables.markdown(gives), page_tables.markdown(costs), ran_on)
    return {"gives and costs": "\n\n".join(parts), "abilities": abilities()}


def main() -> None:
    parser = timing.parser(__doc__, rounds=7)
    add_text(parser)
    parser.add_argument("--page", action="store_true", help="write the tables alone")
    options = parser.parse_args()
    if not options.page:
        measure(options.text, options.rounds)
    page_tables.write(PAGE, tables())


if __name__ == "__main__":
    main()
