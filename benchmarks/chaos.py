"""Fault trials: real training processes are killed, starved and damaged; what is left must resume to
exactly the weights of an undisturbed run, or be refused in one line.

    python benchmarks/chaos.py [--seed 1] [--workers 2] [--only KIND ...]     -> results/chaos.json

Every trial is seeded and starts its own processes: forks of this one, which has already imported
torch, that run `memspan train` and the other verbs through the command line's entry point. Verdicts:

    survived    the weights, the optimiser, the memory and all scores are bit for bit those of an
                undisturbed run, and no half-written file remains
    refused     a verb ended with status 2 and one line, nothing was changed, and if the line names a
                remedy, following it led to the same weights
    failed      anything else: a traceback, a different result, a lost checkpoint

"Torn saves" are interrupted before each of a save's file system operations (counted first), by SIGKILL
and by a system error.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 Making an optimiser imports it: here once, not in every process.

import timing
from faults.runs import ARCHITECTURES, Failure, make_reference
from faults.trials import (
    NEED_MOUNTS,
    Trial,
    count_operations,
    kinds,
    own_mounts,
)

VERDICTS = ("survived", "refused", "failed")
Plan = list[tuple[dict[str, Any], Callable[[Trial], str]]]
"""Description of each trial, and its function."""


def plan(seed: int, operations: int, mounts: bool, only: list[str]) -> Plan:
    draw = random.Random(seed)
    names = itertools.cycle(ARCHITECTURES)
    trials: Plan = []
    for kind, detail, test, times in kinds(operations):
        for _ in range(times):
            about = {"kind": kind, "detail": detail, "architecture": next(names)}
            about["seed"] = draw.randrange(1 << 30)
            chosen = not only or any(text in kind for text in only)
            if chosen and (mounts or kind not in NEED_MOUNTS):
                trials.append((about, test))
    return trials


state: dict[str, Any] = {}


def attempt(number: int) -> dict[str, Any]:
    """A trial's verdict and, where it failed, why."""
    about, test = state["trials"][number]
    architecture = about["architecture"]
    home = state["root"] / f"trial-{number}"
    reference = state["references"][architecture]
    try:
        verdict = test(Trial(home, architecture, reference, random.Random(about["seed"])))
        shutil.rmtree(home, ignore_errors=True)
        return about | {"verdict": verdict}
    except Failure as failure:
        return about | {"verdict": "failed", "note": str(failure)}
    except Exception:
        return about | {"verdict": "failed", "note": traceback.format_exc()}


def main() -> None:
    parser = timing.parser(__doc__, results="chaos.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", nargs="*", default=[], help="kinds that contain this text")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--folder", default=memory, help="where to train, by default in memory")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    # As if the extra were not installed: a picture takes longer than these runs.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    begin = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="memspan-chaos-", dir=options.folder))
    mounts = own_mounts()
    print(f"undisturbed runs of {', '.join(ARCHITECTURES)} in {root}", flush=True)
    references = {name: make_reference(root, name, count_operations) for name in ARCHITECTURES}
    operations = max(reference.operations for reference in references.values())
    trials = plan(options.seed, operations, mounts, options.only)
    state.update(trials=trials, references=references, root=root)
    rows = []
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        for row in pool.imap_unordered(attempt, range(len(trials))):
            rows.append(row)
            if row["verdict"] == "failed":
                print(f"\nFAILED {row}\n", flush=True)
            if len(rows) % 20 == 0:
                print(f"{len(rows)}/{len(trials)}  {time.monotonic() - begin:.0f} s", flush=True)
    counts: dict[str, Counter[str]] = {about["kind"]: Counter() for about, _ in trials}
    for row in rows:
        counts[row["kind"]][row["verdict"]] += 1
    print(f"\n| fault | trials | {' | '.join(VERDICTS)} |\n" + "| --- " * 5 + "|")
    for kind, found in {**counts, "**all**": sum(counts.values(), Counter())}.items():
        print(f"| {kind} | {found.total()} | {' | '.join(str(found[v]) for v in VERDICTS)} |")
    if not mounts:
        print(f"mounting is not allowed here: left out are {', '.join(NEED_MOUNTS)}")
    record = {
        "seconds": round(time.monotonic() - begin),
        "operations_of_a_save": operations,
        "faults": {
            kind: {"tried": found.total(), **{v: found[v] for v in VERDICTS}}
            for kind, found in counts.items()
        },
        "failures": [row for row in rows if row["verdict"] == "failed"],
        "machine": timing.machine(),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(trials)} faults, written: {options.json}")
    shutil.rmtree(root, ignore_errors=True)
    sys.exit(1 if record["failures"] else 0)


if __name__ == "__main__":
    main()
