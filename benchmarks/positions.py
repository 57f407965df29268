"""Measure the cost of sinusoids in the presets for Tiny Shakespeare, against learned positions.

    python benchmarks/positions.py [--models transformer-xl compressive] [--seeds 1 2 3 4 5] [--steps N]

Each preset is trained with both position terms, the recipe, the seed and the order of the text
unchanged. The text is cut from training alone: the models are trained on the first nine tenths of
Tiny Shakespeare's first nine tenths, and scored on what is left of those: nats per byte, in one
stream, with the memory of training and, where the positions allow it, with twice as much. Rows that
are already in benchmarks/results/positions.json are not repeated.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import timing
import trainings
from memspan.lab.runs.options import read_config
from shakespeare import PRESETS, add_text, parts
from sides import Side

MODELS = ("transformer-xl", "compressive")


def run(job: dict[str, Any], text: Path) -> dict[str, Any]:
    """One training and its scores."""
    config = read_config(PRESETS[job["model"]])
    steps = job.get("steps", config.train.steps)
    loop = dataclasses.replace(config.train, steps=steps, seed=job["seed"])
    model = dataclasses.replace(config.model, positions=job["positions"], max_distance=None)
    model = model.for_segments(loop.segment_length)
    config = dataclasses.replace(config, train=loop, model=model)
    whole, _ = parts(text)
    cut = len(whole) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        (part := Path(folder) / "text.txt").write_bytes(whole[:cut].tobytes())
        side = Side(config, part)
        seconds = side.train(steps)
    found = {"steps": steps, "parameters": side.n_parameters, "cpu_seconds": seconds}
    found["nats"] = side.score(whole[cut:])
    if job["positions"] == "sinusoidal":
        sizes = [option.name for option in dataclasses.fields(model.memory_options)]
        doubled = {name: 2 * getattr(model, name) for name in sizes}
        found["nats_twice"] = side.score(whole[cut:], **doubled)
    return found


def main() -> None:
    parser = timing.parser(__doc__, results="positions.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", type=int, help="updates (default: the preset's)")
    trainings.add_options(parser, seeds=(1, 2, 3, 4, 5))
    add_text(parser)
    options = parser.parse_args()
    given = {"steps": options.steps} if options.steps else {}
    jobs = [
        {"model": model, "positions": positions, "seed": seed} | given
        for model in options.models
        for seed in options.seeds
        for positions in ("learned", "sinusoidal")
    ]
    rows = trainings.make(jobs, partial(run, text=options.text), options.json, options.workers)
    print(trainings.table(rows, ("model", "positions", "steps"), ("nats", "nats_twice")))
    for (model, steps), group in trainings.grouped(rows, "model", "steps").items():
        learned, sinusoids = trainings.grouped(group, "positions").values()
        pairs = zip(learned, sinusoids, strict=False)
        more = [b["nats"] - a["nats"] for a, b in pairs]
        print(f"{model}, {steps} steps: sinusoids cost {trainings.spread(more, 4)}")


if __name__ == "__main__":
    main()
