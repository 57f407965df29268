"""What sinusoids cost the presets for Tiny Shakespeare, beside learned tables of positions.

    python benchmarks/positions.py [--models transformer-xl compressive] [--seeds 1 2 3 4 5] [--steps N]

Each preset is trained with both position terms, the recipe, the seed and the order of the text
unchanged. The text is cut from training alone: the models are trained on the first nine tenths of
Tiny Shakespeare's first nine tenths, and scored on what is left of those: nats per byte, in one
stream, with the memory of training and, where the positions allow it, with twice as much. Rows that
are already in benchmarks/results/positions.json are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from memspan.runs.options import RunConfig, read_config
from shakespeare import PRESETS, add_text, parts
from sides import Side
from timing import machine

RESULTS = Path(__file__).resolve().parent / "results" / "positions.json"
MODELS = ("transformer-xl", "compressive")
POSITIONS = ("learned", "sinusoidal")


def config_of(model: str, positions: str, steps: int | None, seed: int) -> RunConfig[Any]:
    """The preset with this position term."""
    config = read_config(PRESETS[model])
    loop = dataclasses.replace(config.train, steps=steps or config.train.steps, seed=seed)
    backbone = dataclasses.replace(config.model, positions=positions, max_distance=None)
    backbone = backbone.for_segments(loop.segment_length)
    return dataclasses.replace(config, train=loop, model=backbone)


def row(model: str, positions: str, steps: int | None, seed: int, text: Path) -> dict[str, Any]:
    """One training and its scores."""
    whole, _ = parts(text)
    cut = len(whole) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        (part := Path(folder) / "text.txt").write_bytes(whole[:cut].tobytes())
        side = Side(config_of(model, positions, steps, seed), part)
        seconds = side.train(side.state.config.train.steps)
    nats = {"as trained": side.score(whole[cut:])}
    if positions == "sinusoidal":
        doubled = {
            option.name: 2 * getattr(side.state.config.model, option.name)
            for option in dataclasses.fields(side.state.config.model.memory_options)
        }
        nats["twice the memory"] = side.score(whole[cut:], **doubled)
    return {
        "model": model,
        "positions": positions,
        "seed": seed,
        "steps": side.step,
        "parameters": side.n_parameters,
        "nats": nats,
        "cpu_seconds": seconds,
        "machine": machine(),
    }


def summary(rows: list[dict[str, Any]], model: str) -> str:
    """What sinusoids cost this model: the mean of the paired differences, and its range."""
    by = {(r["positions"], r["seed"]): r["nats"]["as trained"] for r in rows if r["model"] == model}
    seeds = sorted({seed for _, seed in by if all((p, seed) in by for p in POSITIONS)})
    if not seeds:
        return f"{model}: no seed of both"
    learned, sinusoidal = ([by[p, seed] for seed in seeds] for p in POSITIONS)
    more = [s - t for s, t in zip(sinusoidal, learned, strict=True)]
    spread = f" ± {stdev(more):.4f}" if len(more) > 1 else ""
    return (
        f"{model}: learned {mean(learned):.4f}, sinusoidal {mean(sinusoidal):.4f} nats per byte; "
        f"difference {mean(more):+.4f}{spread} ({min(more):+.4f} to {max(more):+.4f}, "
        f"{len(seeds)} seeds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, help="updates (default: the preset's)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are")
    add_text(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.json.read_text()) if options.json.is_file() else []
    done = {(r["model"], r["positions"], r["seed"]) for r in rows}
    for model in options.models:
        for seed in options.seeds:
            for positions in POSITIONS:
                if (model, positions, seed) not in done:
                    rows.append(row(model, positions, options.steps, seed, options.text))
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(summary(rows, model), flush=True)


if __name__ == "__main__":
    main()
