"""Compare initialisations: sizes of activations over widths and depths, and training.

    python benchmarks/initialisation.py look [--models transformer-xl ...] [--rules papers scaled ...]
    python benchmarks/initialisation.py train [--models ...] [--rules ...] [--sizes preset large]
                                              [--seeds 1 2 3] [--steps 600] [--workers 2]

A rule is `papers`, `scaled`, or `scaled` with other factors, see memspan/models/initialisation.py:
"scaled embedding=1 residual=0.5". `look` takes seconds for each: the loss right after initialisation,
and the root mean square of the residual stream and of what the layers add to it. `train` trains the
presets, and models of twice their width, on the first 81 % of Tiny Shakespeare and scores the 4.5 %
after them, memory carried. The last tenth, on which results are reported, is not used. Runs that are in
benchmarks/results/initialisation.json already are not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import timing
import trainings
from memspan.lab.runs.options import RunConfig
from memspan.models import LanguageModel, initialisation
from memspan.models.fast_weights.model import FACTORS as OWN
from memspan.models.registry import MODELS
from shakespeare import add_text
from shakespeare import preset as published
from sides import Side, its_own, shortened

SHAPES = ((64, 4), (256, 4), (512, 4), (128, 2), (128, 12))
"""Widths and depths for `look`."""


def factors(rule: str) -> tuple[str, dict[str, float]]:
    """The scheme, and the factors that the rule changes."""
    scheme, *changes = rule.split()
    pairs = (change.split("=") for change in changes)
    return scheme, {name: float(value) for name, value in pairs}


@contextlib.contextmanager
def changed(rule: str) -> Iterator[None]:
    """The rule's factors in place of those of every architecture."""
    changes = factors(rule)[1]
    with mock.patch.dict(initialisation.FACTORS, changes), mock.patch.dict(OWN, changes):
        yield


def preset(name: str, rule: str, size: str = "preset") -> RunConfig[Any]:
    """The preset ``name`` with the rule's scheme; ``large``: twice as wide, with twice the heads."""
    config = published(name)
    times = 2 if size == "large" else 1
    widths = {n: times * getattr(config.model, n, 0) for n in ("d_model", "n_heads", "d_ff")}
    sizes = its_own(config.model, widths) | {"initialisation": factors(rule)[0]}
    model = dataclasses.replace(config.model, **sizes)
    model = model.for_segments(config.train.segment_length)
    return dataclasses.replace(config, model=model)


def look(name: str, rule: str, width: int, depth: int, text: Tensor) -> str:
    """A line of statistics right after initialisation."""
    config = preset(name, rule)
    sizes = {"d_model": width, "n_layers": depth, "n_heads": width // 32, "d_ff": 4 * width}
    model = dataclasses.replace(config.model, **its_own(config.model, sizes))
    torch.manual_seed(1)
    with changed(rule):
        net = LanguageModel(256, model)
    seen: dict[str, list[float]] = defaultdict(list)

    def watch(what: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            tensor = inputs[0] if what == "stream" else output
            seen[what].append(tensor.detach().square().mean().sqrt().item())

        return record

    for path, module in net.named_modules():
        if path.endswith("final_norm"):
            module.register_forward_hook(watch("stream"))
        elif path.endswith("feed_forward.outer"):
            module.register_forward_hook(watch("feed-forward"))
        elif path.endswith(("attention.output", ".output")):
            module.register_forward_hook(watch("attention"))
    rows = text.view(4, -1)[:, :33]
    # The reference calls the modules that have hooks.
    loss = net(rows[:, :-1], targets=rows[:, 1:], implementation="reference").loss.item()
    kinds = ("stream", "attention", "feed-forward")
    shown = "".join(f"{mean(seen[kind] or [math.nan]):8.2f}" for kind in kinds)
    return f"{name:<15}{width:>5}{depth:>4}  {rule:<34}  loss {loss:6.2f}{shown}"


def train(job: dict[str, Any], text: Path) -> dict[str, Any]:
    """One training, and its score."""
    config = shortened(preset(job["model"], job["rule"], job["size"]), job["steps"], job["seed"])
    with changed(job["rule"]):
        side = Side(config, text)
    seconds = side.train(job["steps"])
    nats = side.score(side.prepared.splits["validation"].tokens, streams=16)
    return {"nats": nats, "cpu_seconds": round(seconds, 1)}


def main() -> None:
    parser = timing.parser(__doc__, results="initialisation.json")
    parser.add_argument("what", choices=["look", "train"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rules", nargs="+", default=["papers", "scaled"])
    parser.add_argument("--sizes", nargs="+", default=["preset"], choices=["preset", "large"])
    parser.add_argument("--steps", type=int, default=600)
    trainings.add_options(parser, seeds=(1,))
    add_text(parser)
    options = parser.parse_args()
    whole = options.text.read_bytes()
    if options.what == "look":
        torch.set_num_threads(1)
        text = torch.tensor(list(whole[: 4 * 20_000]))
        print(f"{'':<60}   stream, attention, feed-forward")
        for name, (width, depth), rule in product(options.models, SHAPES, options.rules):
            print(look(name, rule, width, depth, text), flush=True)
        return
    names = ("seed", "size", "model", "rule")
    chosen = product(options.seeds, options.sizes, options.models, options.rules)
    jobs = [dict(zip(names, job, strict=True)) | {"steps": options.steps} for job in chosen]
    with tempfile.TemporaryDirectory() as folder:
        (text_file := Path(folder) / "tuning.txt").write_bytes(whole[: len(whole) * 9 // 10])
        rows = trainings.make(jobs, partial(train, text=text_file), options.json, options.workers)
    print(trainings.table(rows, ("model", "size", "steps", "rule"), ("nats",)))


if __name__ == "__main__":
    main()
