"""Measure what memory is worth: each preset against itself with its memory emptied at every segment.

    python benchmarks/memory_worth.py [--models transformer-xl gpt ...] [--sides ...] [--seeds 1 2 3]
                                      [--steps N] [--workers 2]

Sides of every architecture, with the recipe, the seed and the order of the text unchanged:

    carried              the preset: memory goes from segment to segment
    emptied              emptied before every segment, in training and scoring
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

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import timing
import trainings
from memspan.lab.runs.options import RunConfig
from memspan.models.initialisation import initialise
from memspan.models.registry import MODELS
from peers.gpt import GPTRun
from shakespeare import add_text, parts, preset
from sides import Side

TRANSFORMER_XL_SIDES = ("carried in scoring", "long segments")
SIDES = ("carried", "emptied", *TRANSFORMER_XL_SIDES)
GPT_SIDES = ("nanoGPT", "scaled", "scaled, tuned")
GPT_STEPS = 2000
"""Updates of nanoGPT's recipe."""
RESULTS = timing.RESULTS / "memory-worth.json"
PLOT = RESULTS.with_suffix(".png")
PLOTTED = ("fast-weights", "gated-delta-net", "feedback", "compressive", "transformer-xl")
"""From the lowest to the highest in the picture."""


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


def run(job: dict[str, Any], text: Path) -> dict[str, Any]:
    """Train one side and score it."""
    trained_on, held_out = parts(text)
    model, name, seed, steps = (job[key] for key in ("model", "side", "seed", "steps"))
    scores = {}
    if model == "gpt":
        steps = steps or GPT_STEPS
        rate = GPTRun.RATE * (2 if name == "scaled, tuned" else 1)
        gpt = GPTRun(trained_on, steps, seed, rate)
        if name != "nanoGPT":
            initialise(gpt.model, "scaled")
        seconds = gpt.train(steps)
        parameters = sum(p.numel() for p in gpt.model.parameters())
        scores["nats_half"] = gpt.score(held_out, stride=GPTRun.CONTEXT // 2)
        scores["nats"] = gpt.score(held_out)
    else:
        config = config_of(model, name, steps, seed)
        steps = config.train.steps
        side = Side(config, text, emptied=name != "carried")
        seconds = side.train(steps)
        parameters = side.n_parameters
        if name == "carried in scoring":
            side.emptied = False
            half = side.state.config.model.memory_length // 2
            scores["nats_half"] = side.score(held_out, memory_length=half)
        scores["nats"] = side.score(held_out)
    about = {"steps_made": steps, "parameters": parameters, "cpu_seconds": round(seconds, 1)}
    return about | scores


def plot(rows: list[dict[str, Any]], path: Path = PLOT) -> None:
    """Draw each seed's nats per byte, trained and scored with memory carried and with it emptied, and
    a line between their means. Only runs of a preset's own number of steps."""
    import plots

    figure, (axes,) = plots.panels(1, 2.9)
    for place, model in enumerate(PLOTTED):
        look = plots.look(model) | {"linestyle": "none", "markersize": 6}
        means = []
        for side in ("carried", "emptied"):
            nats = [
                row["nats"]
                for row in rows
                if (row["model"], row["side"], row["steps"]) == (model, side, None)
            ]
            means.append(sum(nats) / len(nats))
            face = look["color"] if side == "carried" else "none"
            axes.plot(nats, [place] * len(nats), markerfacecolor=face, zorder=3, **look)
        axes.plot(means, [place, place], color=look["color"])
        gain = f"{means[1] - means[0]:.3f}"
        axes.annotate(gain, (sum(means) / 2, place + 0.12), ha="center", va="bottom")
    for side, face in (("carried", "black"), ("emptied", "none")):
        axes.plot(
            [], [], "o", color="black", markerfacecolor=face, label=f"memory {side}", markersize=6
        )
    axes.set_yticks(range(len(PLOTTED)), PLOTTED)
    axes.set_ylim(-0.5, len(PLOTTED) - 0.3)
    axes.set_xlabel("nats per byte (less is better)")
    plots.name_lines(figure, axes)
    plots.save(figure, path)


def main() -> None:
    parser = timing.parser(__doc__, results="memory-worth.json")
    names = ["gpt", *MODELS]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES, metavar="SIDE")
    parser.add_argument("--steps", type=int, help="steps per run (default: the preset's)")
    trainings.add_options(parser)
    add_text(parser)
    options = parser.parse_args()
    jobs = [
        {"model": model, "side": side, "seed": seed, "steps": options.steps}
        for seed in options.seeds
        for model in options.models
        for side in (GPT_SIDES if model == "gpt" else options.sides)
        if side not in TRANSFORMER_XL_SIDES or model == "transformer-xl"
    ]
    rows = trainings.make(jobs, partial(run, text=options.text), options.json, options.workers)
    by = ("model", "side", "steps_made")
    print(trainings.table(rows, by, ("nats", "nats_half", "cpu_seconds")))
    if options.json == RESULTS:
        plot(rows)


if __name__ == "__main__":
    main()
