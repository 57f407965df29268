"""Delta rule against sum rule against Transformer-XL: equal parameters, equal tokens, several seeds.

All are trained on Tiny Shakespeare by memspan's trainer, memory carried from segment to segment, with
the optimiser of the Fast Weights preset. Each is scored on the last tenth of the text twice: every
segment by itself, and as one stream with the memory carried from the first byte to the last. Runs of
other seeds or models in the JSON file, with as many steps, stay in it: the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import plots
from memspan.errors import MemspanError
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig, preset_file, read_config
from shakespeare import add_text, parts
from sides import Side
from timing import machine

HERE = Path(__file__).resolve().parent


def contestants(preset: RunConfig[Any]) -> dict[str, RunConfig[Any]]:
    """The models, with nearly equal numbers of parameters."""
    delta = preset.model
    # Fast Weights' wider feed-forward makes up for Transformer-XL's position projection.
    xl = TransformerXLConfig(
        n_layers=delta.n_layers,
        d_model=delta.d_model,
        n_heads=delta.n_heads,
        d_ff=delta.d_ff - delta.d_model // 2,
        activation=delta.activation,
        memory_length=preset.train.segment_length,
    )
    return {
        "delta": preset,
        "sum": dataclasses.replace(preset, model=dataclasses.replace(delta, rule="sum")),
        "sum, attention": dataclasses.replace(
            preset, model=dataclasses.replace(delta, rule="sum", normalisation="attention")
        ),
        "transformer-xl": dataclasses.replace(preset, model=xl, architecture="transformer-xl"),
    }


def run(config: RunConfig[Any], text: Path) -> dict[str, float]:
    """Train once; the score segment by segment, and with the memory carried."""
    side, (_, validation) = Side(config, text), parts(text)
    found: dict[str, float] = {
        "parameters": side.n_parameters,
        "cpu_seconds": side.train(config.train.steps),
    }
    n_segments = len(validation) // config.train.segment_length
    for name, streams in (("segments", n_segments), ("carried", 1)):
        try:
            found[name] = side.score(validation, streams)
        except MemspanError as error:
            print(f"{name}: {error}")
            found[name] = float("inf")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_text(parser)
    parser.add_argument("--steps", type=int, default=1500, help="per run (default: 1500)")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of a run each (default: 1 2 3)"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "results",
        help="folder for fast-weights-learning.json and .png (default: benchmarks/results)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    preset = read_config(preset_file("tiny-shakespeare-fast-weights"))
    path = options.output / "fast-weights-learning.json"
    tokens = options.steps * preset.train.batch_size * preset.train.segment_length
    for seed in options.seeds:
        loop = dataclasses.replace(preset.train, steps=options.steps, seed=seed)
        for name, config in contestants(dataclasses.replace(preset, train=loop)).items():
            if name not in (options.models or [name]):
                continue
            row = {"model": name, "seed": seed} | run(config, options.text)
            print(json.dumps(row), flush=True)
            keep(path, tokens, row, list(contestants(preset)))
    rows = earlier(path, tokens)
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        scores = []
        for kind in ("segments", "carried"):
            values = [row[kind] for row in mine]
            spread = stdev(values) if len(values) > 1 else 0.0
            scores.append(f"{kind} {mean(values):.4f} +- {spread:.4f}")
        print(f"{name:<15} {mine[0]['parameters']:,} parameters  " + "  ".join(scores))
    plot(rows, path.with_suffix(".png"))
    print(f"written: {path}, {path.with_suffix('.png')}")


def keep(path: Path, tokens: int, row: dict[str, Any], order: list[str]) -> None:
    """Add a row to the file, replacing an earlier one of the same model and seed."""

    def place(row: dict[str, Any]) -> tuple[int, int]:
        return order.index(row["model"]), row["seed"]

    rows = [r for r in earlier(path, tokens) if place(r) != place(row)] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"rows": sorted(rows, key=place), "tokens_trained": tokens, "machine": machine()}
    path.write_text(json.dumps(result, indent=1) + "\n")


def earlier(path: Path, tokens: int) -> list[dict[str, Any]]:
    """Rows of earlier runs of the same length."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    rows: list[dict[str, Any]] = found["rows"]
    return rows if found["tokens_trained"] == tokens else []


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A point for each seed, without and with the memory carried."""
    figure, (axes,) = plots.panels(1, 3.2)
    names = list(dict.fromkeys(row["model"] for row in rows))
    kinds = {"segments": "every segment by itself", "carried": "memory carried throughout"}
    looks = {"segments": plots.look("transformer"), "carried": plots.look("fast-weights")}
    for i, (kind, label) in enumerate(kinds.items()):
        at = [names.index(row["model"]) + 0.2 * i - 0.1 for row in rows]
        style = looks[kind] | {"linestyle": ""}
        axes.plot(at, [row[kind] for row in rows], label=label, **style)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.set(ylabel="validation loss, nats per byte")
    plots.name_lines(figure, axes, columns=1)
    plots.save(figure, path)


if __name__ == "__main__":
    main()
