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
    """Fields of a results file's rows that are shown."""

    file: str
    title: str
    fields: str
    """Their names, with spaces between them."""


TABLES = (
    Table(
        "latest.json",
        "Speed and memory against other libraries",
        "architecture work size precision peer same_function ratio low high tokens_per_second "
        "peer_tokens_per_second peak_megabytes",
    ),
    Table(
        "gated-delta-net.json",
        "Gated DeltaNet beside layers of transformers",
        "work size precision ratio low high tokens_per_second peer_tokens_per_second "
        "peak_megabytes peer_peak_megabytes",
    ),
    Table(
        "no-compiler.json",
        "Without a C compiler",
        "architecture work size peer ratio low high tokens_per_second peer_tokens_per_second",
    ),
    Table(
        "memory-worth.json",
        "What memory is worth, on Tiny Shakespeare",
        "model side seed steps_made parameters cpu_seconds nats",
    ),
    Table(
        "sliding.json",
        "Evaluation with memory against a sliding window",
        "attention_length sliding_tokens_per_second tokens_per_second ratio low high",
    ),
    Table(
        "compressive-learning.json",
        "Transformer-XL and Compressive, side by side",
        "model seed parameters cpu_seconds bits_per_byte",
    ),
    Table(
        "feedback-learning.json",
        "Transformer-XL and Feedback, side by side",
        "model seed parameters seconds bits_per_byte",
    ),
    Table(
        "fast-weights-learning.json",
        "Rules of Fast Weights and Transformer-XL, side by side",
        "model seed parameters cpu_seconds segments carried",
    ),
    Table(
        "fast-weights-length.json",
        "Fast Weights: cost of a token by the text's length",
        "tokens recompute microseconds_per_token bytes_per_token",
    ),
    Table(
        "recompute.json",
        "Layers computed again in the backward pass",
        "architecture tensors tensors_recomputed process process_recomputed time",
    ),
    Table("initialisation.json", "Initialisations", "model rule size steps seed nats cpu_seconds"),
)
HEADS = {
    "peer": "other library",
    "ratio": "times as fast",
    "low": "lowest",
    "high": "highest",
    "tokens_per_second": "tokens/s",
    "peer_tokens_per_second": "its tokens/s",
    "sliding_tokens_per_second": "window, tokens/s",
    "peak_megabytes": "peak MB",
    "peer_peak_megabytes": "its peak MB",
    "steps_made": "steps",
    "cpu_seconds": "CPU seconds",
    "seconds": "CPU seconds",
    "nats": "nats per byte",
    "segments": "nats per byte, segments alone",
    "carried": "nats per byte, memory carried",
    "microseconds_per_token": "µs per token",
    "tensors": "MB of tensors",
    "tensors_recomputed": "recomputed",
    "process": "MB of the process",
    "process_recomputed": "recomputed",
    "time": "times the time",
}
"""A field's head of a column, with its unit, where its name does not say enough."""


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
    names = table.fields.split()
    rows = [[_shown(row.get(name)) for name in names] for row in _rows(results, table)]
    head = [HEADS.get(name, name.replace("_", " ")) for name in names]
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
    for name in table.fields.split():
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
    """Findings of ``memspan measure`` for an architecture.

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
        meaning = (
            "Its loss was still falling at the longest history that was tried"
            if span["beyond"]
            else "That is the shortest history with which its loss is within 0.01 bits per byte of the "
            f"loss with {run['longest']:,} tokens"
        )
        return (
            f"**{more}{span['tokens']:,} tokens** (95 % interval: {span['low']:,} to "
            f"{span['high']:,}). {meaning}. Measured on {run['corpus']} by "
            f"`memspan measure {run['run']}`; {run['parameters']:,} parameters."
        )
    except (KeyError, TypeError, ValueError):
        raise DocsError(
            f"{path} is not the measure.json of one run: write it by memspan measure"
        ) from None
