"""Tables of measured rows, from the JSON files in ``benchmarks/results``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docsite.code import ROOT
from docsite.errors import DocsError

RESULTS = Path("benchmarks/results")


@dataclass(frozen=True)
class Table:
    """Which rows of a results file are shown, and how."""

    file: str
    title: str
    columns: dict[str, str]
    """A row's field -> the column's head, with its unit."""


TABLES = (
    Table(
        "latest.json",
        "Speed and memory against other libraries",
        {
            "architecture": "architecture",
            "work": "work",
            "size": "size",
            "precision": "precision",
            "peer": "other library",
            "same_function": "same function",
            "ratio": "times as fast",
            "low": "lowest",
            "high": "highest",
            "tokens_per_second": "tokens/s",
            "peer_tokens_per_second": "its tokens/s",
            "peak_megabytes": "peak MB",
        },
    ),
    Table(
        "gated-delta-net.json",
        "Gated DeltaNet beside layers of transformers",
        {
            "work": "work",
            "size": "size",
            "precision": "precision",
            "ratio": "times as fast",
            "low": "lowest",
            "high": "highest",
            "tokens_per_second": "tokens/s",
            "peer_tokens_per_second": "its tokens/s",
            "peak_megabytes": "peak MB",
            "peer_peak_megabytes": "its peak MB",
        },
    ),
    Table(
        "no-compiler.json",
        "Without a C compiler",
        {
            "architecture": "architecture",
            "work": "work",
            "size": "size",
            "peer": "other library",
            "ratio": "times as fast",
            "low": "lowest",
            "high": "highest",
            "tokens_per_second": "tokens/s",
            "peer_tokens_per_second": "its tokens/s",
        },
    ),
    Table(
        "memory-worth.json",
        "What memory is worth, on Tiny Shakespeare",
        {
            "model": "model",
            "side": "side",
            "seed": "seed",
            "steps_made": "steps",
            "parameters": "parameters",
            "cpu_seconds": "CPU seconds",
            "nats": "nats per byte",
        },
    ),
    Table(
        "sliding.json",
        "Evaluation with memory against a sliding window",
        {
            "attention_length": "attention length",
            "sliding_tokens_per_second": "window, tokens/s",
            "tokens_per_second": "memory, tokens/s",
            "ratio": "times as fast",
            "low": "lowest",
            "high": "highest",
        },
    ),
    Table(
        "compressive-learning.json",
        "Transformer-XL and Compressive, side by side",
        {
            "model": "model",
            "seed": "seed",
            "parameters": "parameters",
            "cpu_seconds": "CPU seconds",
            "bits_per_byte": "bits per byte",
        },
    ),
    Table(
        "feedback-learning.json",
        "Transformer-XL and Feedback, side by side",
        {
            "model": "model",
            "seed": "seed",
            "parameters": "parameters",
            "seconds": "CPU seconds",
            "bits_per_byte": "bits per byte",
        },
    ),
    Table(
        "fast-weights-learning.json",
        "Rules of Fast Weights and Transformer-XL, side by side",
        {
            "model": "model",
            "seed": "seed",
            "parameters": "parameters",
            "cpu_seconds": "CPU seconds",
            "segments": "nats per byte, segments alone",
            "carried": "nats per byte, memory carried",
        },
    ),
    Table(
        "fast-weights-length.json",
        "Fast Weights: cost of a token by the text's length",
        {
            "tokens": "tokens",
            "recompute": "recompute",
            "microseconds_per_token": "µs per token",
            "bytes_per_token": "bytes per token",
        },
    ),
    Table(
        "recompute.json",
        "Layers computed again in the backward pass",
        {
            "architecture": "architecture",
            "tensors": "MB of tensors",
            "tensors_recomputed": "recomputed",
            "process": "MB of the process",
            "process_recomputed": "recomputed",
            "time": "times the time",
        },
    ),
    Table(
        "initialisation.json",
        "Initialisations",
        {
            "model": "model",
            "rule": "rule",
            "size": "size",
            "steps": "steps",
            "seed": "seed",
            "nats": "nats per byte",
            "cpu_seconds": "CPU seconds",
        },
    ),
)


def measured_rows(root: Path = ROOT) -> str:
    """The end of the page on benchmarks: every table that has its results file."""
    parts = [
        "## Measured rows",
        "All rows of the results files, as the benchmarks wrote them.",
    ]
    for table in TABLES:
        parts += _section(table, root)
    return "\n\n".join(parts) + "\n"


def _section(table: Table, root: Path) -> list[str]:
    path = RESULTS / table.file
    if not (root / path).is_file():
        return []
    results = json.loads((root / path).read_text(encoding="utf-8"))
    rows = [[_shown(row.get(name)) for name in table.columns] for row in _rows(results, table)]
    head = list(table.columns.values())
    return [
        f"### {table.title}",
        _machine(results["machine"]),
        # The class keeps names on one line.
        '<div class="rows" markdown="block">',
        "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]),
        "</div>",
    ]


def _rows(results: dict[str, Any], table: Table) -> list[dict[str, Any]]:
    rows = results.get("rows")
    if "machine" not in results or not isinstance(rows, list):
        raise _of_another_form(table, "has no machine and rows")
    for name in table.columns:
        # A row measured without a peer has none of its columns.
        if not any(name in row for row in rows):
            raise _of_another_form(table, f"has no row with {name}")
    return rows


def _of_another_form(table: Table, what: str) -> DocsError:
    return DocsError(
        f"{RESULTS / table.file} {what}: measure it again, or correct its table in "
        "docs/docsite/benchmarks.py"
    )


def _machine(machine: dict[str, Any]) -> str:
    command = str(machine["command"])
    note = f" {machine['note']}." if "note" in machine else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, threads: {machine['threads']}; Python "
        f"{machine['python']}, torch {machine['torch']}; {machine['date']}. `{command}`.{note}"
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def measured_span(architecture: str, root: Path = ROOT) -> str:
    """What ``memspan measure`` found for an architecture.

    The file is ``benchmarks/results/span-ARCHITECTURE.json``, a ``measure.json`` as that command writes
    it.

    Raises:
        DocsError: it is of another form.
    """
    path = RESULTS / f"span-{architecture}.json"
    if not (root / path).is_file():
        return "Its span has not been measured yet."
    report = json.loads((root / path).read_text(encoding="utf-8"))
    try:
        (run,) = report["runs"]
        span = run["span"]
        more = "At least " if span["beyond"] else ""
        return (
            f"**{more}{span['tokens']:,} tokens** (95 %: {span['low']:,} to {span['high']:,}), "
            f"measured on {run['corpus']} by `memspan measure {run['run']}` with up to "
            f"{run['longest']:,} tokens of history; {run['parameters']:,} parameters."
        )
    except (KeyError, TypeError, ValueError):
        raise DocsError(
            f"{path} is not the measure.json of one run: write it by memspan measure"
        ) from None
