"""Feedback against Transformer-XL on Tiny Shakespeare at equal parameters and CPU time, several seeds;
and what a curriculum, or a start from the Transformer-XL, saves.

    python benchmarks/feedback_learning.py                       # hours; two runs at once
    python benchmarks/feedback_learning.py --seconds 60 --seeds 1

Sides: `feedback`, the preset without its curriculum; `transformer-xl`, with twice as many layers
and the width that gives as many parameters; `curriculum`, the preset; `from transformer-xl`, a
Feedback with projections per layer that starts from a Transformer-XL of the same shape, whose training
time counts. Every side is trained by memspan's trainer for `--seconds` of CPU time.
Validation: the first 32,768 bytes of the text's last tenth, in bits per byte, memory carried, 16
streams. The table also shows when each side reached the first one's final score. Runs of as many
seconds in the results file are not repeated: the script can be stopped and started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import plots
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs import run as runs
from memspan.runs.options import RunConfig, preset_file, read_config
from memspan.training.warm_start import initialise_from
from shakespeare import add_text, parts
from sides import Side, n_parameters
from timing import write

HERE = Path(__file__).resolve().parent
SIDES = ("feedback", "transformer-xl", "curriculum", "from transformer-xl")
LOOKS = {
    "feedback": ("feedback", 0),
    "transformer-xl": ("transformer-xl", 0),
    "curriculum": ("feedback", 2),
    "from transformer-xl": ("feedback", 4),
}
POINTS = 16
VALIDATION = 32_768
FIRST = 0.3
"""Share of the time spent on the Transformer-XL that another side starts from."""


def transformer_xl(preset: RunConfig[Any], n_layers: int, d_model: int) -> RunConfig[Any]:
    model: FeedbackConfig = preset.model
    xl = TransformerXLConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=model.n_heads,
        d_ff=d_model * model.d_ff // model.d_model,
        activation=model.activation,
        memory_length=model.memory_length,
        positions="learned",
        max_distance=model.memory_length + preset.train.segment_length,
    )
    return dataclasses.replace(preset, model=xl, architecture="transformer-xl")


def configs(preset: RunConfig[Any]) -> dict[str, RunConfig[Any]]:
    """One per side."""
    loop = dataclasses.replace(preset.train, first_segment_length=None, curriculum_steps=0)
    plain = dataclasses.replace(preset, train=loop)
    wanted, layers = n_parameters(preset), 2 * preset.model.n_layers
    xl = min(
        (transformer_xl(plain, layers, width) for width in range(32, 257, 4)),
        key=lambda c: abs(n_parameters(c) - wanted),
    )
    per_layer = dataclasses.replace(preset.model, projections="per-layer")
    return {
        "feedback": plain,
        "transformer-xl": xl,
        "curriculum": preset,
        "from transformer-xl": dataclasses.replace(plain, model=per_layer),
    }


def run(job: tuple[str, RunConfig[Any], Path, float]) -> dict[str, Any]:
    """Train once; the validation curve against tokens and CPU seconds."""
    name, config, text, seconds = job
    torch.set_num_threads(1)
    validation = parts(text)[1][:VALIDATION]
    curve: list[dict[str, float]] = []
    clock, tokens = 0.0, 0

    def train(side: Side, until: float) -> None:
        nonlocal clock, tokens
        state = side.state
        loop, before = state.config.train, 0
        begun = clock
        # The schedules count steps, so their number is estimated first.
        while clock < until:
            clock += side.train(1)
            step, read = side.step, loop.tokens_read(side.step) * loop.batch_size
            tokens, before = tokens + read - before, read
            if len(curve) < POINTS * clock / seconds or clock >= until:
                bits = side.score(validation, streams=16) / math.log(2)
                curve.append({"tokens": tokens, "cpu_seconds": clock, "bits": bits})
            if step == 50 or step % 200 == 0:
                total = max(step + 1, round(step * (until - begun) / (clock - begun)))
                loop = dataclasses.replace(loop, steps=total)
                state.config = dataclasses.replace(state.config, train=loop)

    trained = None
    if name == "from transformer-xl":
        first = transformer_xl(config, config.model.n_layers, config.model.d_model)
        source = Side(first, text)
        train(source, FIRST * seconds)
        model, tokenizer = source.state.model, source.prepared.tokenizer
        trained = runs.Run(Path(), first, tokenizer, model, step=source.step, corpus={})
    side = Side(config, text)
    if trained:
        initialise_from(side.state.model, side.prepared.tokenizer, trained)
    train(side, seconds)
    return {
        "model": name,
        "seed": config.train.seed,
        "seconds": seconds,
        "parameters": side.n_parameters,
        "curve": curve,
        "bits_per_byte": curve[-1]["bits"],
    }


def reached(row: dict[str, Any], bits: float) -> float | None:
    """CPU seconds until the curve is at or below ``bits``."""
    return next((p["cpu_seconds"] for p in row["curve"] if p["bits"] <= bits), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_text(parser)
    parser.add_argument("--seconds", type=float, default=600, help="CPU time per run")
    parser.add_argument("--seeds", type=int, default=3, help="runs per side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE")
    parser.add_argument("--processes", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--output", type=Path, default=HERE / "results", help="folder for feedback-learning.*"
    )
    options = parser.parse_args()
    made = configs(read_config(preset_file("tiny-shakespeare-feedback")))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "feedback-learning.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if row["seconds"] == options.seconds]
    jobs = []
    for seed in range(1, options.seeds + 1):
        for side in options.sides:
            loop = dataclasses.replace(made[side].train, seed=seed)
            config = dataclasses.replace(made[side], train=loop)
            if not any((row["model"], row["seed"]) == (side, seed) for row in rows):
                jobs.append((side, config, options.text, options.seconds))
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for row in pool.imap(run, jobs, chunksize=1):
            rows.append(row)
            write(path, rows)
            print(f"{row['model']:<20} seed {row['seed']}  {row['bits_per_byte']:.4f}", flush=True)
    rows.sort(key=lambda row: (SIDES.index(row["model"]), row["seed"]))
    goal = mean(r["bits_per_byte"] for r in rows if r["model"] == options.sides[0])
    for side in options.sides:
        mine = [row for row in rows if row["model"] == side]
        scores = [row["bits_per_byte"] for row in mine]
        times = [reached(row, goal) for row in mine]
        spread = stdev(scores) if len(scores) > 1 else 0.0
        when = f"{mean(t for t in times if t):.0f} s" if all(times) else "not reached"
        print(
            f"{side:<20} {mine[0]['parameters']:>9,} parameters  {mean(scores):.4f} +- {spread:.4f} "
            f"bits per byte, {mean(r['curve'][-1]['tokens'] for r in mine):>11,.0f} tokens; "
            f"{goal:.3f} after {when}"
        )
    plot(rows, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One line per run, against tokens and against time."""
    figure, panels = plots.panels(2, sharey=True)
    names = list(dict.fromkeys(row["model"] for row in rows))
    for axes, key, unit in zip(panels, ("tokens", "cpu_seconds"), (1e6, 1), strict=True):
        for name in names:
            style = plots.look(*LOOKS[name]) | {"linewidth": 1.2, "markevery": 3}
            for n, row in enumerate(r for r in rows if r["model"] == name):
                at = [point[key] / unit for point in row["curve"]]
                bits = [point["bits"] for point in row["curve"]]
                axes.plot(at, bits, label=name if n == 0 else None, **style)
        axes.set(ylabel="validation, bits per byte", ylim=(None, 4))
    panels[0].set(xlabel="millions of tokens read")
    panels[1].set(xlabel="CPU seconds of training")
    plots.name_lines(figure, panels[0])
    plots.save(figure, path)


if __name__ == "__main__":
    main()
