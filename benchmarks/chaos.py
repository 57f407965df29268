"""Fault trials: real training processes are killed, starved, damaged and misled; what is left
must resume to exactly the weights of an undisturbed run, or be refused in one line.

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

import argparse
import errno
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # Making an optimiser imports it: here once, not in every process.

from faults.mounts import can_be_immutable, own_mounts
from faults.runs import ARCHITECTURES, BY_TWO, COMPILED, Failure, Reference, make_reference
from faults.trials import (
    becomes_read_only,
    corpus_changed,
    damaged,
    fails_from,
    file_size_limit,
    full_disk,
    jumping_clock,
    kill_at_any_moment,
    kill_in_a_save,
    kill_of_two,
    moved_while_training,
    output_that_fails,
    read_only,
    second_trainer,
    spoiled_code,
    started_together,
    torn_by,
    untrusted_code,
)

RESULTS = Path(__file__).parent / "results" / "chaos.json"
VERDICTS = ("survived", "refused", "failed")
FILES = (
    "run/config.toml", "run/tokenizer.json", "run/model.safetensors", "run/metrics.jsonl",
    "run/checkpoints/step-00000028/model.safetensors",
    "run/checkpoints/step-00000035/model.safetensors",
    "run/checkpoints/step-00000035/training.safetensors",
    "run/checkpoints/step-00000035/state.json",
    "read.memory",
    "cache/tokens/*/train.bin", "cache/tokens/*/train.json", "cache/tokens/*/validation.bin",
    "cache/tokens/*/validation.json", "cache/tokens/*/tokenizer.json",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    kind: str
    detail: str
    seed: int
    architecture: str
    test: Callable[[Path, Reference, str, random.Random], str]
    """Returns the verdict; raises Failure."""


def plan(seed: int, mounts: bool, immutable: bool, operations: dict[str, int]) -> list[Trial]:
    names = itertools.cycle(ARCHITECTURES)
    draw = random.Random(seed)
    trials: list[Trial] = []

    two, compiled = itertools.cycle(BY_TWO), itertools.cycle(COMPILED)

    def add(
        kind: str,
        test: Callable[..., str],
        times: int,
        detail: str = "",
        among: Iterator[str] = names,
    ) -> None:
        for _ in range(times):
            trials.append(Trial(kind, detail, draw.randrange(1 << 30), next(among), test))

    add("SIGKILL at any moment", kill_at_any_moment, 24)
    add("SIGKILL in a save", kill_in_a_save, 24)
    most = max(operations.values())
    for at in range(most):
        add("torn save, SIGKILL", torn_by(None, at), 1, f"operation {at}")
    for at in range(most):
        number = (errno.EIO, errno.ENOSPC)[at % 2]
        add("torn save, system error", torn_by(number, at), 1, f"operation {at}")
    if mounts:
        add("full disk (small tmpfs)", full_disk, 12)
        add("read-only folder (mount)", read_only, 6)
    else:
        add("full disk (RLIMIT_FSIZE)", file_size_limit, 12)
    if immutable:
        add("folder becomes immutable", becomes_read_only, 6)
    add("disk fails for good (EIO, EROFS)", fails_from(errno.EIO), 6)
    add("disk fails for good (EIO, EROFS)", fails_from(errno.EROFS), 6)
    for file in FILES:
        add("bit flipped", damaged(file, "flip"), 4, file)
        add("tail cut", damaged(file, "cut"), 2, file)
    add("folder moved while training", moved_while_training, 8)
    add("corpus changed before resuming", corpus_changed, 12)
    add("compiled code damaged", spoiled_code, 8, among=compiled)
    add("compiled code open to others", untrusted_code, 4, among=compiled)
    add("second trainer", second_trainer, 6)
    add("two started together", started_together, 6)
    add("clock jumps", jumping_clock, 8)
    for how in ("head", "/dev/full", "ascii", "cp1252"):
        if how != "/dev/full" or os.path.exists(how):
            add("output that fails", output_that_fails(how), 4, how)
    add("SIGKILL of one of two processes", kill_of_two("rank"), 6, among=two)
    add("SIGKILL of the launcher of two", kill_of_two("launcher"), 4, among=two)
    return trials


state: dict[str, Any] = {}


def attempt(number: int) -> tuple[int, str, str, float]:
    trial: Trial = state["trials"][number]
    home = state["root"] / f"trial-{number}"
    begin = time.monotonic()
    try:
        reference = state["references"][trial.architecture]
        verdict, note = (
            trial.test(home, reference, trial.architecture, random.Random(trial.seed)),
            "",
        )
        shutil.rmtree(home, ignore_errors=True)
    except Failure as failure:
        verdict, note = "failed", str(failure)
    except Exception:
        verdict, note = "failed", traceback.format_exc()
    return number, verdict, note, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", nargs="*", default=[], help="kinds that contain this text")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--folder", default=memory, help="where to train, by default in memory")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed trials")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    # As if the extra were not installed: a picture takes longer than these runs.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    begin = time.monotonic()
    if options.folder:
        os.makedirs(options.folder, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="memspan-chaos-", dir=options.folder))
    mounts, immutable = own_mounts(), can_be_immutable(root)
    context = multiprocessing.get_context("fork")
    print(f"undisturbed runs of {', '.join(ARCHITECTURES)} in {root}", flush=True)
    references = {name: make_reference(root, name) for name in ARCHITECTURES}
    operations = {name: r.operations for name, r in references.items()}
    trials = plan(options.seed, mounts, immutable, operations)
    if options.only:
        trials = [t for t in trials if any(text in t.kind for text in options.only)]
    state.update(trials=trials, references=references, root=root)
    rows = []
    with context.Pool(options.workers) as pool:
        for done, (number, verdict, note, seconds) in enumerate(
            pool.imap_unordered(attempt, range(len(trials))), 1
        ):
            trial = trials[number]
            rows.append((number, trial, verdict, note, seconds))
            bad = sum(row[2] == "failed" for row in rows)
            line = f"{done}/{len(trials)}  {bad} failed  {time.monotonic() - begin:.0f} s  {trial.kind}"
            if verdict == "failed":
                print(
                    f"\nFAILED {trial.kind} {trial.detail} {trial.architecture} "
                    f"seed {trial.seed}: {note}\n",
                    flush=True,
                )
            if sys.stdout.isatty():
                print(f"\r{line:<78}", end="", flush=True)
            elif done % 20 == 0 or done == len(trials):
                print(line, flush=True)
    seconds = time.monotonic() - begin
    counts: dict[str, Counter[str]] = {}
    for _, trial, verdict, _, _ in rows:
        counts.setdefault(trial.kind, Counter())[verdict] += 1
    order = [k for k in dict.fromkeys(t.kind for t in trials)]
    print(
        f"\n| {'fault':<33} | tried | survived | refused | failed |\n| --- | --- | --- | --- | --- |"
    )
    for kind in [*order, "all"]:
        found = counts[kind] if kind != "all" else sum(counts.values(), Counter())
        cells = " | ".join(f"{found[v]:>{len(v)}}" for v in VERDICTS)
        print(f"| {kind:<33} | {found.total():>5} | {cells} |")
    print(f"{len(trials)} faults in {seconds:.0f} s, seed {options.seed}")
    if not mounts:
        print("mounting is not allowed here: a limit on file sizes stood for the full disk")
    if not immutable:
        print("folders cannot be made immutable here: that fault was left out")
    if not options.only:
        record = {
            "command": f"python benchmarks/chaos.py --seed {options.seed}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
            "seconds": round(seconds),
            "operations_of_a_save": operations,
            "faults": {
                k: {"tried": counts[k].total(), **{v: counts[k][v] for v in VERDICTS}}
                for k in order
            },
            "failures": [
                {
                    "kind": t.kind,
                    "detail": t.detail,
                    "architecture": t.architecture,
                    "seed": t.seed,
                    "note": note,
                }
                for _, t, verdict, note, _ in sorted(rows, key=lambda row: row[0])
                if verdict == "failed"
            ],
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {RESULTS}")
    failed = any(row[2] == "failed" for row in rows)
    if not (failed and options.keep):
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
