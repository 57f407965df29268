"""What memory is worth: each preset against itself with its memory emptied at every segment.

    python benchmarks/memory_worth.py [--models transformer-xl gpt ...] [--sides ...] [--seeds 1 2 3]
                                      [--steps N] [--workers 2]

Sides of every architecture, with the recipe, the seed and the order of the text unchanged:

    carried              the preset: memory goes from segment to segment
    emptied              emptied before every segment, in training and scoring; the same number of steps
    emptied, equal time  the same for as many steps as fit the CPU time of `carried`
    carried in scoring   Transformer-XL: emptied in training alone; scored with a memory of M tokens
                         and, `nats_half`, of M / 2
    long segments        Transformer-XL: no memory, segments of T + M tokens, as many tokens a step

`gpt` is the plain GPT by nanoGPT's recipe for a CPU; `gpt, scaled` with our initialisation;
`gpt, scaled, tuned` with twice the learning rate as well, the best of three. All are trained on the
first nine tenths of Tiny Shakespeare and scored at the end on the last tenth: nats per byte,
in one stream, segment by segment where memory is emptied. The GPT is scored in windows of its
context and, `nats_half`, in windows of which only the second half counts. Runs that are already in
benchmarks/results/memory-worth.json are not repeated: the script can be stopped and started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from learning import GPTRun
from memspan.models.initialisation import initialise
from memspan.models.registry import MODELS
from memspan.runs.options import RunConfig
from shakespeare import add_text, parts, preset
from sides import Side
from timing import machine, seconds_per_call

RESULTS = Path(__file__).resolve().parent / "results" / "memory-worth.json"
TRANSFORMER_XL_SIDES = ("carried in scoring", "long segments")
SIDES = ("carried", "emptied", "emptied, equal time", *TRANSFORMER_XL_SIDES)
GPT_SIDES = ("nanoGPT", "scaled", "scaled, tuned")
GPT_STEPS = 2000
"""Of nanoGPT's recipe."""


def config_of(model: str, side: str, steps: int | None, seed: int) -> RunConfig[Any]:
    """The preset as the side trains it."""
    config = preset(model)
    loop = dataclasses.replace(config.train, steps=steps or config.train.steps, seed=seed)
    backbone = config.model
    if side == "long segments":
        length = loop.segment_length + backbone.memory_length
        rows = loop.batch_size * loop.segment_length // length
        loop = dataclasses.replace(loop, segment_length=length, batch_size=rows)
        backbone = dataclasses.replace(backbone, memory_length=0)
    backbone = backbone.for_segments(loop.segment_length)
    return dataclasses.replace(config, train=loop, model=backbone)


def seconds_per_step(model: str, seed: int, text: str) -> tuple[float, float]:
    """CPU seconds per step of `carried` and `emptied`, taking turns; full segments."""
    config = config_of(model, "carried", None, seed)
    loop = dataclasses.replace(config.train, first_segment_length=None, curriculum_steps=0)
    config = dataclasses.replace(config, train=loop)
    times: tuple[list[float], list[float]] = ([], [])
    sides = [Side(config, text, emptied=emptied) for emptied in (False, True)]
    for _ in range(6):
        for side, seconds in zip(sides, times, strict=True):
            seconds.append(seconds_per_call(side.update, 5))
    # The first round warms up.
    return median(times[0][1:]), median(times[1][1:])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train one side and score it."""
    torch.set_num_threads(1)
    trained_on, held_out = parts(job["text"])
    model, name, seed, steps = (job[key] for key in ("model", "side", "seed", "steps"))
    side: Side | GPTRun
    if model == "gpt":
        steps = steps or GPT_STEPS
        tuned = name == "scaled, tuned"
        side = GPTRun(trained_on, steps, seed, rate=GPTRun.RATE * (2 if tuned else 1))
        if name != "nanoGPT":
            initialise(side.model, "scaled")
        parameters = side.model.parameters()
    else:
        config = config_of(model, name, steps, seed)
        steps = config.train.steps
        if name == "emptied, equal time":
            carried, emptied = seconds_per_step(model, seed, job["text"])
            steps = round(steps * carried / emptied)
            config = config_of(model, name, steps, seed)
        side = Side(config, job["text"], emptied=name != "carried")
        parameters = side.state.model.parameters()
    start = time.process_time()
    for _ in range(steps):
        side.update()
    seconds = time.process_time() - start
    scores = {}
    if isinstance(side, GPTRun):
        scores["nats_half"] = side.score(held_out, stride=GPTRun.CONTEXT // 2)
    elif name == "carried in scoring":
        side.emptied = False
        half = side.state.config.model.memory_length // 2
        scores["nats_half"] = side.score(held_out, memory_length=half)
    scores["nats"] = side.score(held_out)
    kept = {key: job[key] for key in ("model", "side", "seed", "steps")}
    return (
        kept
        | {
            "steps_made": steps,
            "parameters": sum(p.numel() for p in parameters),
            "cpu_seconds": round(seconds, 1),
        }
        | scores
    )


def table(runs: list[dict[str, Any]]) -> str:
    """A line for each side: mean and spread over its seeds."""
    groups = defaultdict(list)
    for each in runs:
        groups[each["model"], each["side"], each["steps"]].append(each)
    lines = [f"{'model':<15}{'side':<21}{'steps':>7}{'CPU s':>8}{'nats':>9}  spread  seeds"]
    for (model, side, _), found in groups.items():
        nats = [each["nats"] for each in found]
        spread = f"{stdev(nats):6.3f}" if len(nats) > 1 else "     -"
        steps, seconds = (
            mean(each[key] for each in found) for key in ("steps_made", "cpu_seconds")
        )
        lines.append(
            f"{model:<15}{side:<21}{steps:>7,.0f}{seconds:>8.0f}{mean(nats):>9.4f}  {spread}  "
            f"{len(nats)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["gpt", *MODELS]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES, metavar="SIDE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="steps per run (default: the preset's)")
    parser.add_argument("--workers", type=int, default=2, help="runs at once, a core each")
    add_text(parser)
    options = parser.parse_args()
    jobs = [
        {"model": model, "side": side, "seed": seed, "steps": options.steps}
        for seed in options.seeds
        for model in options.models
        for side in (GPT_SIDES if model == "gpt" else options.sides)
        if side not in TRANSFORMER_XL_SIDES or model == "transformer-xl"
    ]
    found = earlier()
    # Of runs that do not name their own.
    first = {"machine": json.loads(RESULTS.read_text())["machine"] if found else machine()}
    done = [{key: each[key] for key in jobs[0]} for each in found]
    waiting = [job | {"text": str(options.text)} for job in jobs if job not in done]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for row in pool.imap_unordered(run, waiting):
            print(json.dumps(row), flush=True)
            # Read again: another call may have added its own.
            found = [*earlier(), row | {"machine": machine()}]
            found.sort(key=lambda r: (names.index(r["model"]), r["side"], r["seed"]))
            RESULTS.write_text(json.dumps({"runs": found} | first, indent=1) + "\n")
    print(table(found))


def earlier() -> list[dict[str, Any]]:
    """The runs in the results file."""
    runs: list[dict[str, Any]] = (
        json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else []
    )
    return runs


if __name__ == "__main__":
    main()
