"""Measure what memory is worth to an agent: examples/ppo.py with every architecture, twice.

    python benchmarks/agents.py                              # what is missing, model by model
    python benchmarks/agents.py --environments repeat --models gru none
    python benchmarks/agents.py --pictures                   # draw what is there

A cart whose speeds are hidden (POPGym's PositionOnlyCartPole) and RepeatPreviousEasy, which asks for
the card of three steps ago: 100,000 steps each. Two layers, about as many parameters as Transformer-XL
of width 64 has, a span of 32 steps. Each model's learning rate is the best of three, tried alike with
seed 0, by the mean return of the last quarter; then three other seeds. CPU time on one thread.
Runs that are in results/agents.json are not repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import plots
import timing
from trainings import make, rows_in

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import ppo

FILE = timing.RESULTS / "agents.json"
MODELS = {
    "transformer-xl": plots.look("transformer-xl"),
    "gated-transformer-xl": plots.look("transformer-xl", 2),
    "gated-delta-net": plots.look("gated-delta-net"),
    "gru": plots.look("lstm"),
    "none": plots.look("transformer"),
    "fast-weights": plots.look("fast-weights"),
    "feedback": plots.look("feedback"),
}
"""Memories, and how their lines look."""
ENVIRONMENTS = {"repeat": "RepeatPreviousEasy", "cartpole": "PositionOnlyCartPole"}
RATES = (5e-4, 1e-3, 2e-3)
SEEDS = (1, 2, 3)
STEPS = 100_000


def n_parameters(memory: str, width: int) -> int:
    options = ppo.Options(memory=memory, width=width)  # type: ignore[arg-type]
    return sum(p.numel() for p in ppo.backbone_of(options).build().parameters())


@functools.cache
def width_of(memory: str) -> int:
    """The width with about as many parameters as Transformer-XL of width 64, four heads in it."""
    wanted = n_parameters("transformer-xl", 64)
    return min(range(16, 129, 4), key=lambda width: abs(n_parameters(memory, width) - wanted))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train: returns over steps and CPU seconds, at twenty places."""
    width = width_of(job["memory"])
    options = dataclasses.replace(ppo.Options(steps=STEPS, width=width), **job)
    rows = list(ppo.train(options))
    kept = rows[:: max(len(rows) // 20, 1)] + rows[-1:]
    last = mean(row["return"] for row in rows[-len(rows) // 4 :])
    parameters = n_parameters(job["memory"], width)
    curve = [[row["steps"], row["cpu_seconds"], row["return"]] for row in kept]
    return {"parameters": parameters, "width": width, "last": round(last, 4), "curve": curve}


def picture() -> None:
    """Return against steps and against time, mean and range over seeds."""
    rows = [row for row in rows_in(FILE) if row["seed"]]
    figure, axes = plots.panels(4, 2.2)
    pairs = zip(axes[::2], axes[1::2], ENVIRONMENTS.items(), strict=True)
    for by_steps, by_seconds, (environment, title) in pairs:
        for memory, style in MODELS.items():
            found = [
                r["curve"] for r in rows if (r["environment"], r["memory"]) == (environment, memory)
            ]
            if not found:
                continue
            steps, seconds, returns = torch.tensor(found).unbind(-1)
            style = style | {"markevery": max(1, returns.shape[1] // 8)}
            for at, ax in ((steps[0] / 1000, by_steps), (seconds.mean(0), by_seconds)):
                ax.plot(at, returns.mean(0), label=memory, **style)
                low = returns.amin(0)
                high = returns.amax(0)
                ax.fill_between(at, low, high, color=style["color"], alpha=0.12, linewidth=0)
        by_steps.set(title=title, xlabel="thousands of environment steps", ylabel="return")
        by_seconds.set(xlabel="CPU seconds", ylabel="return")
    # A model may be in one environment alone.
    plots.name_lines(figure, axes[2])
    plots.save(figure, FILE.with_suffix(".png"))


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=[*ENVIRONMENTS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--pictures", action="store_true", help="draw what is there, and no more")
    options = parser.parse_args()
    pairs = [(e, m) for m in options.models for e in options.environments]
    for environment, memory in [] if options.pictures else pairs:
        job = {"environment": environment, "memory": memory}
        trials = [job | {"seed": 0, "learning_rate": rate} for rate in RATES]
        rows = make(trials, run, FILE, options.workers)
        tried = [row for row in rows if not row["seed"] and job.items() <= row.items()]
        job["learning_rate"] = max(tried, key=lambda row: row["last"])["learning_rate"]
        make([job | {"seed": seed} for seed in SEEDS], run, FILE, options.workers)
    picture()


if __name__ == "__main__":
    main()
