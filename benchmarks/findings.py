"""The papers' findings at a size that two slow cores finish, and the page about them.

    python benchmarks/findings.py                  # measures what is missing; hours
    python benchmarks/findings.py --plan           # what that is
    python benchmarks/findings.py --rows positions feedback --seeds 1 --workers 1
    python benchmarks/findings.py --page           # writes the tables of docs/findings.md alone

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
again. docs/findings.md also has tables of other results files.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import page_tables
import timing
import trainings
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.measurement.subject import RunSubject, after_history
from memspan.lab.runs.options import RunConfig
from shakespeare import add_text, parts, preset
from sides import Side, shortened
from trainings import spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import programs

RESULTS = timing.RESULTS / "findings.json"
PAGE = page_tables.DOCS / "findings.md"
STDLIB = "python-stdlib"
SCORED = 131_072
"""Bytes of its test split that are scored."""
STREAMS = 8
"""In which a text is scored: one, the exact protocol, would take a quarter as long as the training."""
MEMORY_LENGTHS = (0, 128, 256, 512)
"""Lengths that the models of the row `positions` are read with, besides that of training."""
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

    steps: int
    """Updates of a training: those with other numbers are trials, and not shown."""
    variants: dict[str, Variant]
    corpus: str | None = None
    """A named corpus (None: Tiny Shakespeare)."""
    more: Callable[[Side, np.ndarray], dict[str, Any]] = lambda side, text: {}
    """Measures further figures, besides the score."""


def by_memory_length(side: Side, text: np.ndarray) -> dict[str, Any]:
    """The score with other lengths of memory."""
    scores = {str(n): side.score(text, STREAMS, memory_length=n) for n in MEMORY_LENGTHS}
    return {"by_memory_length": scores}


def mixture(side: Side, text: np.ndarray) -> dict[str, Any]:
    """Share of each layer's state in a memory vector, the embedding first."""
    backbone: Any = side.state.model.backbone
    if backbone.config.memory_vector != "learned":
        return {}
    return {"mixture": backbone.layer_weights.softmax(0).tolist()}


def compressed_slots(side: Side, text: np.ndarray) -> dict[str, Any]:
    """Score a Compressive Transformer without its compressed slots; measure attention by age.

    Attention is the mean over layers, heads and tokens, added up in equal parts of the compressed
    slots, the memory and the segment, oldest first.
    """
    config = side.state.config
    if config.architecture != "compressive":
        return {}
    T = config.train.segment_length
    slots = config.model
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
        800,
        {
            "recurrence, distances": Variant("transformer-xl", SINUSOIDS),
            "distances": Variant("transformer-xl", SINUSOIDS | {"memory_length": 0}),
            "recurrence": Variant("transformer-xl", NO_DISTANCES),
            "neither": Variant("transformer-xl", NO_DISTANCES | {"memory_length": 0}),
        },
        more=by_memory_length,
    ),
    "feedback": Row(
        800,
        {
            "learned, shared": Variant("feedback"),
            "last, shared": Variant("feedback", {"memory_vector": "last"}),
            "mean, shared": Variant("feedback", {"memory_vector": "mean"}),
            "learned, per layer": Variant("feedback", {"projections": "per-layer"}),
        },
        more=mixture,
    ),
    "compressed-memory": Row(
        1000,
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
        600,
        {
            f"{function}, {loss}": _compression(function, loss)
            for function in ("convolution", "dilated-convolution")
            for loss in ("attention", "auto-encoding", "task")
        }
        | {f: _compression(f, "none") for f in ("mean", "max", "most-used")},
        corpus=STDLIB,
    ),
}
PROGRAMS = {"variables": 5, "seconds": 600, "seed": 1}
"""One seed: the paper's gap is 55 points."""


def config_of(row: str, variant: str, seed: int, steps: int) -> RunConfig[Any]:
    """A training's options."""
    chosen = ROWS[row].variants[variant]
    config = shortened(preset(chosen.architecture), steps, seed)
    loop = dataclasses.replace(config.train, **chosen.train)
    model = dataclasses.replace(config.model, **chosen.model).for_segments(loop.segment_length)
    return dataclasses.replace(config, train=loop, model=model)


def run(job: dict[str, Any], text: Path) -> dict[str, Any]:
    """One training; what was measured."""
    if job["row"] == "programs":
        return run_programs(job)
    row = ROWS[job["row"]]
    config = config_of(job["row"], job["variant"], job["seed"], job["steps"])
    side = Side(config, row.corpus or text)
    seconds = side.train(job["steps"])
    test = side.prepared.splits["test"].tokens[:SCORED]
    held_out = test if row.corpus else parts(text)[1]
    start = time.process_time()
    found = {"nats": side.score(held_out, STREAMS)} | row.more(side, held_out)
    return found | {
        "parameters": side.n_parameters,
        "cpu_seconds": round(seconds, 1),
        "cpu_seconds_of_scores": round(time.process_time() - start, 1),
    }


def run_programs(job: dict[str, Any]) -> dict[str, Any]:
    flags = [f"--{name}={job[name]}" for name in ("variables", "seconds", "seed")]
    options = programs.parsed(flags)
    result = programs.train(job["variant"], options)
    last = result["curve"][-1]
    return {
        "accuracy": last["accuracy"],
        "tokens": last["tokens"],
        "last_value_known": round(programs.unchanged(options), 4),
        "parameters": result["parameters"],
        "cpu_seconds": last["seconds"],
    }


def jobs_of(rows: list[str], seeds: list[int], steps: int | None = None) -> list[dict[str, Any]]:
    """All trainings, first seeds first; ``steps``: in place of the rows' own."""
    jobs = [
        {"row": row, "variant": variant, "seed": seed, "steps": steps or ROWS[row].steps}
        for seed in seeds
        for row in rows
        if row in ROWS
        for variant in ROWS[row].variants
    ]
    if "programs" in rows:
        jobs += [PROGRAMS | {"row": "programs", "variant": name} for name in programs.MODELS]
    return jobs


def shown(row: str) -> dict[str, list[dict[str, Any]]]:
    """The row's trainings of full length by variant, in the order of ``ROWS``."""
    runs = [r for r in trainings.rows_in(RESULTS) if r["row"] == row]
    runs = [r for r in runs if r["steps"] == ROWS[row].steps]
    return {v: [r for r in runs if r["variant"] == v] for v in ROWS[row].variants}


def trained(row: str, more: dict[str, Callable[[dict[str, Any]], float]] | None = None) -> str:
    """A line for each variant; ``more``: further columns, means over seeds where it was measured."""
    more = more or {}
    lines: list[list[object]] = [["", "parameters", "nats per byte", *more, "CPU seconds"]]
    for variant, runs in shown(row).items():
        cells = []
        for measured in more.values():
            try:
                cells.append(f"{mean(map(measured, runs)):.3f}")
            except KeyError:
                cells.append("")
        seconds = mean(r["cpu_seconds"] + r["cpu_seconds_of_scores"] for r in runs)
        nats = spread([r["nats"] for r in runs])
        lines.append([variant, f"{runs[0]['parameters']:,}", nats, *cells, f"{seconds:.0f}"])
    return page_tables.markdown(lines)


def attention() -> str:
    """By age, of the Compressive Transformer."""
    runs = shown("compressed-memory")["compressive"]
    means = [100 * mean(part) for part in zip(*(r["attention"] for r in runs), strict=True)]
    lines = [["share of attention, %", "oldest", *[""] * (BUCKETS - 2), "newest"]]
    for i, kind in enumerate(("compressed slots", "memory", "segment")):
        lines.append([kind, *(f"{x:.1f}" for x in means[i * BUCKETS : (i + 1) * BUCKETS])])
    return page_tables.markdown(lines)


def printed_values(results: list[dict[str, Any]], known: float) -> str:
    """Table of the printed values that each model predicts, on programs."""
    lines = [["", "parameters", "tokens read", "printed values right"]]
    for r in results:
        right = f"{100 * r['accuracy']:.1f} %"
        lines.append([r["variant"], f"{r['parameters']:,}", f"{r['tokens']:,}", right])
    lines.append(["repeating the last known value", "", "", f"{100 * known:.1f} %"])
    return page_tables.markdown(lines)


def three_variables() -> str:
    kept = json.loads((page_tables.DOCS / "programs" / "programs-3.json").read_text())
    results = [
        {"variant": r["model"], "parameters": r["parameters"]} | r["curve"][-1]
        for r in kept["results"]
    ]
    return printed_values(results, kept["last_value_known"])


def five_variables() -> str:
    runs = [r for r in trainings.rows_in(RESULTS) if PROGRAMS.items() <= r.items()]
    return printed_values(runs, runs[0]["last_value_known"])


def retrieval(setting: str) -> str:
    """The losses of examples/retrieval.py by model and number of keys."""
    path = page_tables.DOCS / "retrieval" / f"retrieval-{setting}.json"
    rows = json.loads(path.read_text())["rows"]
    models, keys = (list(dict.fromkeys(row[field] for row in rows)) for field in ("model", "keys"))
    losses = {(row["model"], row["keys"]): f"{row['loss']:.4f}" for row in rows}
    return page_tables.markdown(
        [["keys", *keys], *([m, *(losses[m, k] for k in keys)] for m in models)]
    )


def carried() -> str:
    rows = trainings.rows_in(timing.RESULTS / "fast-weights-learning.json")
    lines = [["nats per byte", "each segment by itself", "carried throughout"]]
    for (model,), group in trainings.grouped(rows, "model").items():
        lines.append(
            [model, *(spread([r[kind] for r in group]) for kind in ("segments", "carried"))]
        )
    return page_tables.markdown(lines)


PAPER_SLOWER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def sliding() -> str:
    rows = trainings.rows_in(timing.RESULTS / "sliding.json")
    lines = [["attention length", "times as fast", "the paper"]]
    for row in rows:
        if slower := PAPER_SLOWER.get(row["attention_length"]):
            cells = [row["attention_length"], round(row["ratio"]), slower]
            lines.append([f"{cell:,}" for cell in cells])
    return page_tables.markdown(lines)


def tables() -> dict[str, str]:
    """Tables of the page."""
    lengths = {
        f"with {n} slots": lambda r, n=n: r["by_memory_length"][str(n)] for n in MEMORY_LENGTHS
    }
    without = {"compressed slots left out": lambda r: r["without_compressed"]}
    layers = {
        f"of {part}": lambda r, i=i: r["mixture"][i]
        for i, part in enumerate(("the embedding", "layer 1", "layer 2"))
    }
    return {
        "positions": trained("positions", lengths),
        "sliding": sliding(),
        "compressed-memory": trained("compressed-memory", without),
        "attention": attention(),
        "compression": trained("compression"),
        "programs-3": three_variables(),
        "programs": five_variables(),
        "feedback": trained("feedback", layers),
        "capacity": retrieval("capacity"),
        "updates": retrieval("updates"),
        "carried": carried(),
    }


def main() -> None:
    parser = timing.parser(__doc__)
    names = [*ROWS, "programs"]
    parser.add_argument("--rows", nargs="+", default=names, choices=names, metavar="ROW")
    parser.add_argument("--steps", type=int, help="of trials, which the page does not show")
    parser.add_argument("--plan", action="store_true", help="list what is missing, and stop")
    parser.add_argument("--page", action="store_true", help="write docs/findings.md, and stop")
    trainings.add_options(parser)
    add_text(parser)
    options = parser.parse_args()
    jobs = jobs_of(options.rows, options.seeds, options.steps)
    if options.plan:
        print(*trainings.missing(jobs, RESULTS), sep="\n")
        return
    if not options.page:
        trainings.make(jobs, partial(run, text=options.text), RESULTS, options.workers)
    page_tables.write(PAGE, tables())


if __name__ == "__main__":
    main()
