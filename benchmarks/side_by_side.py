"""Two architectures side by side on Tiny Shakespeare: equal parameters, equal tokens, several seeds.

Both sides are trained by memspan's trainer from the architecture's preset; Transformer-XL's inner
feed-forward width is chosen so that it has as many parameters. Validation is the entire last tenth of
the text, in bits per byte, memory carried; the final score reads it as one stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

import plots
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig
from shakespeare import add_text, parts, preset
from sides import Side, n_parameters
from timing import write

HERE = Path(__file__).resolve().parent
# Comparison -> preset of the side that Transformer-XL is compared with.
COMPARISONS = ("compressive",)


def transformer_xl(preset: RunConfig[Any]) -> RunConfig[Any]:
    """As many parameters, the same optimiser and uncompressed memory."""
    model, train = preset.model, preset.train

    def sized(d_ff: int) -> RunConfig[Any]:
        xl = TransformerXLConfig(
            n_layers=model.n_layers,
            d_model=model.d_model,
            n_heads=model.n_heads,
            d_ff=d_ff,
            activation=model.activation,
            memory_length=model.memory_length,
            positions="learned",
            max_distance=model.memory_length + train.segment_length,
        )
        return dataclasses.replace(preset, model=xl, architecture="transformer-xl")

    wanted = n_parameters(preset)
    return min(map(sized, range(64, 2049, 16)), key=lambda c: abs(n_parameters(c) - wanted))


def with_table(preset: RunConfig[Any]) -> RunConfig[Any]:
    """Learned positions for the span in use."""
    model = preset.model
    span = model.memory_length + model.compressed_length + preset.train.segment_length
    return dataclasses.replace(preset, model=dataclasses.replace(model, max_distance=span))


def run(job: tuple[RunConfig[Any], Path, int]) -> dict[str, Any]:
    """Train once; validation curve against tokens and CPU seconds, and the final score."""
    config, text, every = job
    torch.set_num_threads(1)
    validation = parts(text)[1]
    side = Side(config, text)
    curve, seconds = [], 0.0
    while side.step < config.train.steps:
        seconds += side.train(min(every, config.train.steps - side.step))
        tokens = side.step * config.train.batch_size * config.train.segment_length
        bits = side.score(validation, streams=16) / math.log(2)
        curve.append({"tokens": tokens, "cpu_seconds": seconds, "bits": bits})
    return {
        "model": config.architecture,
        "seed": config.train.seed,
        "parameters": side.n_parameters,
        "cpu_seconds": seconds,
        "curve": curve,
        "bits_per_byte": side.score(validation) / math.log(2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=COMPARISONS)
    add_text(parser)
    parser.add_argument("--steps", type=int, default=1500, help="per run (default: 1500)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per side (default: 3)")
    parser.add_argument("--processes", type=int, default=2, help="runs at once (default: 2)")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "results",
        help="folder for COMPARISON-learning.json and .png (default: benchmarks/results)",
    )
    options = parser.parse_args()
    recipe = with_table(preset(options.comparison))
    jobs = []
    for seed in range(1, options.seeds + 1):
        loop = dataclasses.replace(recipe.train, steps=options.steps, seed=seed)
        ours = dataclasses.replace(recipe, train=loop)
        every = max(1, options.steps // 10)
        jobs += [(side, options.text, every) for side in (ours, transformer_xl(ours))]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = []
        for row in pool.imap(run, jobs, chunksize=1):
            rows.append(row)
            print(
                f"{row['model']:<15} seed {row['seed']}  {row['bits_per_byte']:.4f} bits per byte",
                flush=True,
            )
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        scores = [row["bits_per_byte"] for row in mine]
        spread = stdev(scores) if len(scores) > 1 else 0.0
        print(
            f"{name:<15} {mine[0]['parameters']:,} parameters  {mean(scores):.4f} +- {spread:.4f} "
            f"bits per byte  {mean(row['cpu_seconds'] for row in mine):.0f} CPU s"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.comparison}-learning.json"
    write(path, rows)
    plot(rows, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean and range over seeds, against tokens and against time."""
    figure, panels = plots.panels(2, sharey=True)
    for name in dict.fromkeys(row["model"] for row in rows):
        curves = [row["curve"] for row in rows if row["model"] == name]
        bits = np.array([[point["bits"] for point in curve] for curve in curves])
        label = f"{name}, {next(r['parameters'] for r in rows if r['model'] == name):,} parameters"
        style = plots.look(name)
        for axes, key, unit in zip(panels, ("tokens", "cpu_seconds"), (1000, 1), strict=True):
            at = np.mean([[point[key] / unit for point in curve] for curve in curves], 0)
            axes.plot(at, bits.mean(0), label=label, **style)
            axes.fill_between(at, bits.min(0), bits.max(0), alpha=0.2, color=style["color"])
            axes.set(ylabel="validation, bits per byte")
    panels[0].set(xlabel="thousands of tokens read")
    panels[1].set(xlabel="CPU seconds of training")
    plots.name_lines(figure, panels[0], columns=1)
    plots.save(figure, path)


if __name__ == "__main__":
    main()
