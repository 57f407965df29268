"""The papers' findings at a size that two slow cores finish, and the page about them.

    python benchmarks/findings.py                            # measures what is missing; hours
    python benchmarks/findings.py --plan                     # what that is, and how long it takes
    python benchmarks/findings.py --rows positions feedback --seeds 1 --workers 1
    python benchmarks/findings.py --page                     # writes docs/findings.md, measures nothing

Trainings by row:

    positions           Transformer-XL with and without recurrence, with and without distances, each
                        then read with other lengths of memory
    feedback            Feedback: memory vectors learned, last, mean; shared and per-layer projections
    compressed-memory   Compressive and Transformer-XL with as many slots, on the Python standard
                        library; attention on the compressed ones
    compression         Compressive: functions and losses, on the same text
    programs            Feedback and Transformer-XL on programs with 5 variables

Models are the presets of Tiny Shakespeare, with fewer steps. Nothing is tuned here. Each training is
scored once, in nats per byte, memory carried, in eight streams: on the last tenth of Tiny Shakespeare,
or on the first 131,072 bytes of the test split of the corpus python-stdlib. Trainings that are in
benchmarks/results/findings.json are not repeated: the script can be stopped with Ctrl-C and started
again. docs/findings.md also has rows of other results files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import findings_page
from findings_page import PROGRAM_SECONDS, STEPS, runs_in
from memspan.data.tokenizers.bytes import ByteTokenizer
from memspan.measurement.subject import RunSubject, after_history
from memspan.runs.options import RunConfig
from shakespeare import add_text, parts, preset
from sides import Side, shortened
from timing import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import programs

RESULTS = findings_page.RESULTS / "findings.json"
STDLIB = "python-stdlib"
SCORED = 131_072
"""Bytes of its test split that are scored."""
STREAMS = 8
"""In which a text is scored: one, the exact protocol, would take a quarter as long as the training."""
MEMORY_LENGTHS = (0, 128, 256, 512)
"""That the models of the row `positions` are read with, besides that of training."""
BUCKETS = 8
"""Parts of each kind of slot in which attention is added up (Rae et al. 2019, figure 2: 6)."""


@dataclass(frozen=True)
class Variant:
    """A preset with other options."""

    architecture: str
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Trainings that are compared with one another."""

    minutes: float
    """CPU time of one training and its scores, about (one core of an AMD EPYC with AVX2)."""
    variants: dict[str, Variant]
    corpus: str | None = None
    """A named corpus (None: Tiny Shakespeare)."""
    more: Callable[[Side, np.ndarray], dict[str, Any]] = lambda side, text: {}
    """What is measured besides the score."""


def by_memory_length(side: Side, text: np.ndarray) -> dict[str, Any]:
    """The score with other lengths of memory."""
    scores = {n: side.score(text, STREAMS, memory_length=n) for n in MEMORY_LENGTHS}
    return {"by_memory_length": scores}


def mixture(side: Side, text: np.ndarray) -> dict[str, Any]:
    """How much of each layer's state is in a memory vector, the embedding first."""
    backbone: Any = side.state.model.backbone
    if backbone.config.memory_vector != "learned":
        return {}
    return {"mixture": backbone.layer_weights.softmax(0).tolist()}


def compressed_slots(side: Side, text: np.ndarray) -> dict[str, Any]:
    """Of a Compressive Transformer: the score without its compressed slots, and attention by age.

    Attention is the mean over layers, heads and tokens, added up in equal parts of the compressed
    slots, the memory and the segment, oldest first.
    """
    config = side.state.config
    if config.architecture != "compressive":
        return {}
    T, slots = config.train.segment_length, config.model
    reach = slots.memory_length + slots.compression_rate * slots.compressed_length
    subject = RunSubject(
        model=side.state.model, tokenizer=ByteTokenizer(), tokens=text, segment_length=T
    )
    draws = np.random.default_rng(1)
    total = torch.zeros(3 * BUCKETS)
    for _ in range(32):
        x, memory = after_history(subject, draws, T * -(-reach // T), T)
        found = side.state.model.backbone.attention_weights(x, memory)
        assert found is not None
        weights = torch.stack([layer.mean((0, 1, 2)) for layer in found.layers]).mean(0)
        # All rows have read as much, so that their slots are the same.
        parts = [weights[kind[0]] for kind in found.kinds.values()]
        total += torch.tensor([c.sum() for part in parts for c in part.tensor_split(BUCKETS)])
    return {
        "without_compressed": side.score(text, STREAMS, compressed_length=0),
        "attention": (total / total.sum()).tolist(),
    }


SINUSOIDS = {"positions": "sinusoidal", "max_distance": None}
NO_DISTANCES = SINUSOIDS | {"clamp_length": 1}
"""All tokens but the query's own have the same position code."""


def _compression(function: str, loss: str) -> Variant:
    if loss != "task":
        return Variant("compressive", {"compression": function, "auxiliary_loss": loss})
    # As in the paper: gradients through two segments, in half as many rows.
    return Variant(
        "compressive",
        {"compression": function, "auxiliary_loss": "none", "task_gradient": True},
        {"accumulate": 2, "gradient_segments": 2, "batch_size": 4},
    )


ROWS = {
    "positions": Row(
        2.2,
        {
            "recurrence, distances": Variant("transformer-xl", SINUSOIDS),
            "distances": Variant("transformer-xl", SINUSOIDS | {"memory_length": 0}),
            "recurrence": Variant("transformer-xl", NO_DISTANCES),
            "neither": Variant("transformer-xl", NO_DISTANCES | {"memory_length": 0}),
        },
        more=by_memory_length,
    ),
    "feedback": Row(
        2.5,
        {
            "learned, shared": Variant("feedback"),
            "last, shared": Variant("feedback", {"memory_vector": "last"}),
            "mean, shared": Variant("feedback", {"memory_vector": "mean"}),
            "learned, per layer": Variant("feedback", {"projections": "per-layer"}),
        },
        more=mixture,
    ),
    "compressed-memory": Row(
        4.0,
        {
            "compressive": Variant("compressive"),
            "transformer-xl": Variant(
                "transformer-xl", {"memory_length": 128, "max_distance": None}
            ),
        },
        corpus=STDLIB,
        more=compressed_slots,
    ),
    "compression": Row(
        2.6,
        {
            f"{function}, {loss}": _compression(function, loss)
            for function in ("convolution", "dilated-convolution")
            for loss in ("attention", "auto-encoding", "task")
        }
        | {f: _compression(f, "none") for f in ("mean", "max", "most-used")},
        corpus=STDLIB,
    ),
}
PROGRAMS = {"variables": 5, "seconds": PROGRAM_SECONDS, "seed": 1}
"""One seed: the paper's gap is 55 points."""


def config_of(row: str, variant: str, seed: int, steps: int) -> RunConfig[Any]:
    """A training's options."""
    chosen = ROWS[row].variants[variant]
    config = shortened(preset(chosen.architecture), steps, seed)
    loop = dataclasses.replace(config.train, **chosen.train)
    model = dataclasses.replace(config.model, **chosen.model).for_segments(loop.segment_length)
    return dataclasses.replace(config, train=loop, model=model)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One training; its key and what was measured."""
    torch.set_num_threads(1)
    key = {name: value for name, value in job.items() if name != "text"}
    found = run_programs(key) if key["row"] == "programs" else run_training(key, job["text"])
    where = {"processor": machine()["cpu"], "python": platform.python_version()}
    return key | found | where


def run_training(key: dict[str, Any], text: str) -> dict[str, Any]:
    row = ROWS[key["row"]]
    side = Side(
        config_of(key["row"], key["variant"], key["seed"], key["steps"]), row.corpus or text
    )
    seconds = side.train(key["steps"])
    test = side.prepared.splits["test"].tokens[:SCORED]
    held_out = test if row.corpus else parts(text)[1]
    start = time.process_time()
    found = {"nats": side.score(held_out, STREAMS)}
    found |= row.more(side, held_out)
    return found | {
        "parameters": side.n_parameters,
        "cpu_seconds": round(seconds, 1),
        "cpu_seconds_of_scores": round(time.process_time() - start, 1),
    }


def run_programs(key: dict[str, Any]) -> dict[str, Any]:
    flags = [f"--{name}={key[name]}" for name in ("variables", "seconds", "seed")]
    options = programs.parsed(flags)
    result = programs.train(key["variant"], options)
    last = result["curve"][-1]
    return {
        "accuracy": last["accuracy"],
        "tokens": last["tokens"],
        "last_value_known": round(programs.unchanged(options), 4),
        "parameters": result["parameters"],
        "cpu_seconds": last["seconds"],
    }


def jobs_of(rows: list[str], seeds: list[int], scale: float) -> list[dict[str, Any]]:
    """The keys of all trainings, first seeds first."""
    jobs = [
        {"row": row, "variant": variant, "seed": seed, "steps": round(STEPS[row] * scale)}
        for seed in seeds
        for row in rows
        if row in ROWS
        for variant in ROWS[row].variants
    ]
    if "programs" in rows:
        key = PROGRAMS | {"row": "programs", "seconds": PROGRAMS["seconds"] * scale}
        jobs += [key | {"variant": name} for name in programs.MODELS]
    return jobs


def minutes(job: dict[str, Any]) -> float:
    """CPU time that a training takes, about."""
    if job["row"] == "programs":
        return job["seconds"] / 60
    return ROWS[job["row"]].minutes * job["steps"] / STEPS[job["row"]]


def _name(job: dict[str, Any]) -> str:
    return f"{job['row']}: {job['variant']}, seed {job['seed']}"


def missing(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are not in the results file."""
    done = runs_in(RESULTS)
    return [job for job in jobs if not any(job.items() <= run.items() for run in done)]


def keep(run: dict[str, Any]) -> None:
    """Add a training to the results file."""
    # Read again: another call may have added its own.
    runs = [*runs_in(RESULTS), run]
    order = [*ROWS, "programs"]
    runs.sort(key=lambda r: (order.index(r["row"]), r["variant"], r["seed"]))
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps({"runs": runs, "machine": machine()}, indent=1) + "\n")
    os.replace(partial, RESULTS)


def measure(jobs: list[dict[str, Any]], workers: int) -> None:
    """Run them, with a line for each."""
    left = sum(map(minutes, jobs))
    # Ctrl-C is for this process, which ends the others.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(workers, signal.signal, ignore) as pool:
        for n, found in enumerate(pool.imap_unordered(run, jobs), 1):
            keep(found)
            left -= minutes(found)
            score = f"{found['nats']:.4f} nats" if "nats" in found else f"{found['accuracy']:.1%}"
            print(
                f"[{n}/{len(jobs)}] {_name(found)}: {score}, {found['cpu_seconds']:.0f} CPU s; "
                f"about {left:.0f} CPU minutes left",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ROWS, "programs"]
    parser.add_argument("--rows", nargs="+", default=names, choices=names, metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2, help="trainings at once, a core each")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="steps and seconds, as a multiple; the page shows those of scale 1",
    )
    parser.add_argument("--plan", action="store_true", help="list what is missing, and stop")
    parser.add_argument("--page", action="store_true", help="write docs/findings.md, and stop")
    add_text(parser)
    options = parser.parse_args()
    jobs = missing(jobs_of(options.rows, options.seeds, options.scale))
    if options.plan:
        for job in jobs:
            print(f"{minutes(job):5.1f} CPU minutes  {_name(job)}")
        print(f"{sum(map(minutes, jobs)):5.0f} CPU minutes for {len(jobs)} trainings")
        return
    try:
        if not options.page:
            measure([job | {"text": str(options.text)} for job in jobs], options.workers)
    except KeyboardInterrupt:
        sys.exit("stopped: what is done is kept, and the same command goes on from there")
    findings_page.write()
    print(f"written: {findings_page.PAGE}")


if __name__ == "__main__":
    main()
