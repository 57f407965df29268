"""Trainings that are compared: each is made once, in a process of its own, and kept in a results file.

A script that makes some can be stopped with Ctrl-C and started again; several may write to one file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from timing import machine

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser, seeds: Sequence[int] = (1, 2, 3)) -> None:
    """Options of every comparison: seeds and parallel trainings."""
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds))
    parser.add_argument("--workers", type=int, default=2, help="trainings at once, a core each")


def rows_in(path: Path) -> list[Row]:
    """Trainings of a results file."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() else []
    return rows


def missing(jobs: list[Row], path: Path) -> list[Row]:
    """The jobs of which the file has no row."""
    done = rows_in(path)
    return [job for job in jobs if not any(job.items() <= row.items() for row in done)]


def keep(row: Row, path: Path) -> None:
    """Add a row to the file, which names the machine of the first; rows name their own."""
    # Read again: another process may have added its own.
    found = json.loads(path.read_text()) if path.is_file() else {"rows": [], "machine": machine()}
    rows = ",\n".join(map(json.dumps, [*found["rows"], row | {"machine": machine()}]))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    first = json.dumps(found.get("machine", machine()))
    written.write_text(f'{{"rows": [\n{rows}\n],\n"machine": {first}}}\n')
    os.replace(written, path)


def make(jobs: list[Row], run: Callable[[Row], Row], path: Path, workers: int) -> list[Row]:
    """Make those that are missing, with a line for each; all rows of the file.

    Args:
        jobs: what tells a training from others; its row has that, too.
        run: makes one, in a process of its own; what was measured.
        path: the results file.
        workers: how many at once.
    """
    waiting = missing(jobs, path)
    # Ctrl-C is for this process, which ends the others.
    with multiprocessing.get_context("spawn").Pool(workers, _prepare) as pool:
        for n, row in enumerate(pool.imap_unordered(partial(_made, run), waiting), 1):
            keep(row, path)
            shown = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
            print(f"[{n}/{len(waiting)}] {json.dumps(shown)}", flush=True)
    return rows_in(path)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _made(run: Callable[[Row], Row], job: Row) -> Row:
    """The job with what was measured."""
    return job | run(job)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (one seed)"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def grouped(rows: list[Row], *by: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that have the same values of these fields, by seed."""
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups[tuple(row[field] for field in by)].append(row)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


def table(rows: list[Row], by: Sequence[str], measured: Sequence[str]) -> str:
    """Means and spreads over seeds, a line for each group."""
    lines = [[*by, *measured, "seeds"]]
    for names, group in grouped(rows, *by).items():
        values = [[row[field] for row in group if field in row] for field in measured]
        cells = [spread(v) if v else "" for v in values]
        lines.append([*map(str, names), *cells, str(len(group))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
