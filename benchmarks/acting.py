"""Steps of an agent's memory: many environments in one call, against a window and against LSTM cells.

    python benchmarks/acting.py                       # some ten minutes on one core
    python benchmarks/acting.py --models lstm --rows 1

A backbone of width 128 and 3 layers, with a memory of 128 slots (Compressive: 64, and 64
compressed ones, one for four), takes one vector of every environment per step (`reader.step`), after
`reader.reset` for the episodes that ended: they last 150 steps on average, so rows are of all ages.
`window`: the same model without memory reads each environment's last 128 vectors anew at every step.
`cells`: as many `torch.nn.LSTMCell` of the same width, with the states of ended episodes multiplied by
zero. CPU time on one thread, median of interleaved rounds; ratios are formed within a round.
Written: results/acting.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import timing
from memspan.models import Backbone
from memspan.models.registry import MODELS
from page_tables import markdown

WIDTH = 128
LAYERS = 3
WINDOW = 128
EPISODE = 150
SIZE = {"n_layers": LAYERS, "d_model": WIDTH}
ATTENTION = SIZE | {"n_heads": 4, "d_ff": 512}
XL = ATTENTION | {"memory_length": 128}
COMPRESSIVE = ATTENTION | {"memory_length": 64, "compressed_length": 64}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer-xl": ("transformer-xl", XL),
    "transformer-xl, fixed": ("transformer-xl", XL | {"attention_span": "fixed"}),
    "transformer-xl, gated": ("transformer-xl", XL | {"gating": "gru"}),
    "compressive": ("compressive", COMPRESSIVE),
    "compressive, gated": ("compressive", COMPRESSIVE | {"gating": "gru"}),
    "feedback": ("feedback", XL),
    "fast-weights": ("fast-weights", ATTENTION),
    "gated-delta-net": ("gated-delta-net", ATTENTION),
    "lstm": ("lstm", SIZE),
}
ROWS = (1, 8, 64)


def made(name: str) -> Backbone[Any]:
    torch.manual_seed(1)
    architecture, options = SIZES[name]
    return MODELS[architecture](**options).build().eval()


def stepping(backbone: Backbone[Any], x: Tensor, ends: Tensor) -> Callable[[], object]:
    """One step of a reader whose rows have episodes behind them; ``x [T, B, D]``, ``ends [T, B]``."""
    reader = backbone.reader(None, x.shape[1])
    vectors = itertools.cycle(x.unbind())
    masks = itertools.cycle(ends.unbind())

    def step() -> None:
        reader.reset(next(masks))
        reader.step(next(vectors))

    for _ in range(2 * EPISODE):
        step()
    return step


def in_window(backbone: Backbone[Any], x: Tensor) -> Callable[[], object]:
    window = x[:WINDOW].transpose(0, 1).contiguous()
    return lambda: backbone(window).hidden[:, -1]


def in_cells(x: Tensor, ends: Tensor) -> Callable[[], object]:
    cells = [nn.LSTMCell(WIDTH, WIDTH) for _ in range(LAYERS)]
    states = [(torch.zeros(x.shape[1:]),) * 2 for _ in cells]
    vectors = itertools.cycle(x.unbind())
    kept = itertools.cycle((~ends).float()[..., None].unbind())

    def step() -> None:
        h = next(vectors)
        own = next(kept)
        for n, cell in enumerate(cells):
            states[n] = cell(h, (states[n][0] * own, states[n][1] * own))
            h = states[n][0]

    return step


@torch.no_grad()
def measure(name: str, rows: int, rounds: int) -> dict[str, object]:
    backbone = made(name)
    x = torch.randn(WINDOW, rows, WIDTH)
    ends = torch.rand(997, rows) < 1 / EPISODE
    sides = {
        "step": stepping(backbone, x, ends),
        "window": in_window(backbone, x),
        "cells": in_cells(x, ends),
    }
    times = timing.interleaved(sides, rounds)
    step = median(times["step"])
    against = {
        side: median(a / b for a, b in zip(times[side], times["step"], strict=True))
        for side in ("window", "cells")
    }
    return {
        "model": name,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "environments": rows,
        "bytes_per_environment": backbone.initial_memory(1).nbytes,
        "steps_per_second": round(1 / step, 1),
        "environment_steps_per_second": round(rows / step, 1),
        "times_a_window": round(against["window"], 1),
        "time_over_lstm_cells": round(1 / against["cells"], 2),
    }


def main() -> None:
    parser = timing.parser(__doc__, rounds=7, results="acting.json")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.rows) < 1:
        parser.error("--rounds and --rows must be at least 1")
    torch.set_num_threads(1)
    found = []
    table = [["model", "environments", "steps/s", "window / step", "step / cells"]]
    for name in options.models:
        for rows in options.rows:
            row = measure(name, rows, options.rounds)
            found.append(row)
            print(f"{name}, {rows} environments: {row['steps_per_second']:,} steps/s", flush=True)
            shown = ("steps_per_second", "times_a_window", "time_over_lstm_cells")
            table.append([name, str(rows), *(f"{row[key]:,}" for key in shown)])
    print(markdown(table))
    timing.write(options.json, found)
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
