"""How weights are best initialised: sizes of activations over widths and depths, and training.

    python benchmarks/initialisation.py look [--models transformer-xl ...] [--rules papers scaled ...]
    python benchmarks/initialisation.py train [--models ...] [--rules ...] [--sizes preset large]
                                              [--seeds 1 2 3] [--steps 600] [--workers 2]

A rule is `papers`, `scaled`, or `scaled` with other factors, see memspan/models/initialisation.py:
"scaled embedding=1 residual=0.5". `look` takes seconds for each: the root mean square of the residual
stream and of what the layers add to it, right after initialisation and after eight updates, and the
loss. `train` trains the presets, and models of twice their width, on the first 81 % of Tiny Shakespeare
and scores the 4.5 % after them, memory carried. The last tenth, on which results are reported, is not
used. Runs that are in benchmarks/results/initialisation.json already are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memspan.models import LanguageModel, initialisation
from memspan.models.fast_weights.model import FACTORS as OWN
from memspan.models.registry import MODELS
from memspan.runs.options import RunConfig
from shakespeare import add_text
from shakespeare import preset as published
from sides import Side
from timing import machine

RESULTS = Path(__file__).resolve().parent / "results" / "initialisation.json"
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
    model = resized(dataclasses.replace(config.model, initialisation=factors(rule)[0]), **widths)
    model = model.for_segments(config.train.segment_length)
    return dataclasses.replace(config, model=model)


def resized(model: Any, **sizes: int) -> Any:
    """The options with these sizes, as far as they have them: an LSTM has no heads."""
    known = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(model, **{n: size for n, size in sizes.items() if n in known})


def look(name: str, rule: str, width: int, depth: int, text: Tensor) -> str:
    """A line of statistics before and after eight updates."""
    config = preset(name, rule)
    heads = width // 32
    model = resized(config.model, d_model=width, n_layers=depth, n_heads=heads, d_ff=4 * width)
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
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.optim.learning_rate)
    memory, line = None, f"{name:<15}{width:>5}{depth:>4}  {rule:<34}"
    for step in range(9):
        rows = text.view(4, -1)[:, step * 32 : step * 32 + 33]
        # The reference calls the modules that have hooks.
        out = net(rows[:, :-1], memory, targets=rows[:, 1:], implementation="reference")
        memory = out.memory.detach()
        if step in (0, 8):
            sizes = "".join(
                f"{mean(seen[w] or [math.nan]):8.2f}"
                for w in ("stream", "attention", "feed-forward")
            )
            line += f"  loss {out.loss.item():6.2f}{sizes}"
        seen.clear()
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return line


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One training, and its score."""
    torch.set_num_threads(1)
    config = preset(job["model"], job["rule"], job["size"])
    loop = dataclasses.replace(config.train, steps=job["steps"], seed=job["seed"])
    if loop.curriculum_steps:
        loop = dataclasses.replace(loop, curriculum_steps=job["steps"] // 2)
    config = dataclasses.replace(config, train=loop)
    with changed(job["rule"]):
        side = Side(config, job["text"])
    seconds = side.train(job["steps"])
    nats = side.score(side.prepared.splits["validation"].tokens, streams=16)
    kept = {name: job[name] for name in ("model", "rule", "size", "steps", "seed")}
    return kept | {"nats": nats, "cpu_seconds": round(seconds, 1)}


def table(runs: list[dict[str, Any]]) -> str:
    """Means and spreads over seeds, a line for each model, size and rule."""
    groups = defaultdict(list)
    for run in runs:
        groups[run["model"], run["size"], run["steps"], run["rule"]].append(run["nats"])
    lines = [f"{'model':<15}{'size':<8}{'steps':>6}  {'rule':<40}{'nats':>8}  spread  seeds"]
    for (model, size, steps, rule), nats in sorted(groups.items()):
        spread = f"{stdev(nats):6.3f}" if len(nats) > 1 else "     -"
        lines.append(
            f"{model:<15}{size:<8}{steps:>6}  {rule:<40}{mean(nats):8.4f}  {spread}  {len(nats)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["look", "train", "table"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rules", nargs="+", default=["papers", "scaled"])
    parser.add_argument("--sizes", nargs="+", default=["preset"], choices=["preset", "large"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    add_text(parser)
    options = parser.parse_args()
    whole = options.text.read_bytes()
    if options.what == "look":
        torch.set_num_threads(1)
        text = torch.tensor(list(whole[: 4 * 20_000]))
        print(f"{'':<60}   as initialised: stream, attention, feed-forward; after 8 updates")
        for name in options.models:
            for width, depth in SHAPES:
                for rule in options.rules:
                    print(look(name, rule, width, depth, text), flush=True)
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
    if options.what == "train":
        with tempfile.TemporaryDirectory() as folder:
            text_file = Path(folder) / "tuning.txt"
            text_file.write_bytes(whole[: len(whole) * 9 // 10])
            jobs = [
                {"model": m, "size": z, "rule": r, "seed": s, "steps": options.steps}
                for s in options.seeds
                for z in options.sizes
                for m in options.models
                for r in options.rules
            ]
            done = [{name: run[name] for name in jobs[0]} for run in found["runs"]]
            waiting = [job | {"text": str(text_file)} for job in jobs if job not in done]
            with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
                for run in pool.imap_unordered(train, waiting):
                    print(json.dumps(run), flush=True)
                    # Read again: another call may have added its own.
                    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
                    found["runs"].append(run)
                    found["machine"] = machine()
                    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["runs"]))


if __name__ == "__main__":
    main()
