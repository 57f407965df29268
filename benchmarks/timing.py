"""Measuring: interleaved rounds, process CPU time, ratios within a round."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from memspan.precision import multiplies_bfloat16

Key = TypeVar("Key", bound=Hashable)
RESULTS = Path(__file__).resolve().parent / "results"


def parser(about: str | None, rounds: int = 0, results: str = "") -> argparse.ArgumentParser:
    """With a docstring as its help, and the options ``--rounds`` and ``--json`` where it has them.

    Args:
        about: the docstring.
        rounds: how many by default; 0: no such option.
        results: the file in benchmarks/results; none: no such option.
    """
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help="rounds (%(default)s)")
    if results:
        where = f"where the rows go (benchmarks/results/{results})"
        made.add_argument("--json", type=Path, default=RESULTS / results, help=where)
    return made


@dataclass(frozen=True)
class Ratio:
    """Ratio of their time to ours: median, lowest and highest over the rounds."""

    middle: float
    low: float
    high: float

    def row(self, digits: int) -> dict[str, Any]:
        """As results files have it."""
        values = {"ratio": self.middle, "low": self.low, "high": self.high}
        return {name: round(value, digits) for name, value in values.items()}


def seconds_per_call(
    work: Callable[[], object], calls: int, clock: Callable[[], float] = time.process_time
) -> float:
    """By default CPU seconds of this process: other processes on the machine disturb it little."""
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls


def no_setting(side: object) -> AbstractContextManager[object]:
    """All sides, unchanged."""
    return nullcontext()


def interleaved(
    sides: dict[Key, Callable[[], object]],
    rounds: int,
    seconds: float = 0.3,
    within: Callable[[Key], AbstractContextManager[object]] = no_setting,
    clock: Callable[[], float] = time.process_time,
) -> dict[Key, list[float]]:
    """Seconds per call of every side, one value per round.

    Sides take turns in every round, so that other work on the machine affects all of
    them; a turn lasts about ``seconds``, or a tenth of the slowest side's call if that is more. The
    order is reversed in every other round. Where a single call takes ten seconds, there are at most
    five rounds. ``within`` is entered for each turn, outside of what is timed. ``clock``: where sides
    have several threads, ``time.perf_counter``.
    """

    def turn(name: Key, calls: int) -> float:
        with within(name):
            return seconds_per_call(sides[name], calls, clock)

    once = {name: turn(name, 1) for name in sides}
    slowest = max(once.values())
    if slowest > 10:
        rounds = min(rounds, 5)
    calls = {}
    for name in sides:
        # A first call may do more than others.
        usual = once[name] if once[name] > 10 else turn(name, 2)
        calls[name] = max(1, round(max(seconds, slowest / 10) / max(usual, 1e-6)))
    times: dict[Key, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            gc.collect()
            times[name].append(turn(name, calls[name]))
    return times


def ratio(theirs: list[float], ours: list[float]) -> Ratio:
    """Their time over ours, round by round."""
    values = [a / b for a, b in zip(theirs, ours, strict=True)]
    return Ratio(median(values), min(values), max(values))


def machine() -> dict[str, object]:
    """The machine and settings of a measurement."""
    return {
        "cpu": _processor(),
        # What it selects its own kernels for, and whether its library of products has bfloat16.
        "capability": torch.backends.cpu.get_cpu_capability(),
        "multiplies_bfloat16": multiplies_bfloat16(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        # Without the folders of this machine.
        "command": shlex.join(
            Path(word).name if Path(word).is_absolute() else word
            for word in (Path(sys.argv[0]).name, *sys.argv[1:])
        ),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The result file of a benchmark: its rows, and where they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")


def _processor() -> str:
    """Its name as Linux has it, or what Python says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
