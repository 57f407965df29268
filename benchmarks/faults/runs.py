"""The runs that faults are applied to: how they are trained, their results, and how they continue."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.injection import in_saves, stop_at
from faults.processes import Done, run, run_new
from memspan.training.metrics import read

STEPS, SAVE_EVERY, STOPPED_AT = 60, 7, 38
MIDDLE = 4 * SAVE_EVERY
"""A save that also publishes the best weights and drops an old checkpoint."""
ARCHITECTURES = {
    "transformer-xl": ["--model.memory-length", "16", "--model.dropout", "0.1"],
    "compressive": ["--model.memory-length", "8", "--model.compressed-length", "4"],
    "feedback": ["--model.memory-length", "16"],
    "fast-weights": ["--model.dropout", "0.1"],
}
TEXT = "../text.txt"
"""One for all trials: its absolute path is in every run's options, which are compared."""
COMPILED = ("feedback", "fast-weights")
"""Architectures with loops in C."""
BY_TWO = ("transformer-xl", "fast-weights")
"""Architectures trained by two processes, which take longer to start than to train."""


def train_arguments(architecture: str) -> list[str]:
    return [
        *["train", "--model", architecture, "--data.corpus", TEXT, "--out", "run"],
        *["--model.n-layers", "2", "--model.d-model", "32", "--model.n-heads", "2"],
        *["--model.d-ff", "64", "--optim.warmup-steps", "10"],
        *["--train.batch-size", "4", "--train.segment-length", "16", "--train.device", "cpu"],
        *["--train.steps", str(STEPS), "--train.save-every", str(SAVE_EVERY)],
        *["--train.evaluate-every", "14", "--train.evaluate-tokens", "256"],
        *["--train.sample-tokens", "0", *ARCHITECTURES[architecture]],
    ]


RESUME = ["train", "--resume", "run"]
TWO = ["--nproc", "2"]
EVALUATE = ["evaluate", "run", "--json", "--tokens", "600", "--segment-length", "16"]
GENERATE = ["generate", "run", "--tokens", "60", "--seed", "3", "--memory", "read.memory"]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in folder.glob("checkpoints/step-*"))


def outcome(folder: Path) -> dict[str, Any]:
    """Everything about a run that must not depend on what happened to it."""
    found: dict[str, Any] = {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.suffix in (".safetensors", ".toml") or p.name == "tokenizer.json" or p.name[0] == "."
    }
    for path in folder.rglob("state.json"):
        # Records of speed differ from run to run, and so do checksums over them.
        state = json.loads(path.read_text().rsplit("\n", 2)[0])
        found[path.relative_to(folder).as_posix()] = {
            k: v for k, v in state.items() if k != "metrics"
        }
    found["metrics"] = [
        {
            k: v
            for k, v in record.items()
            if k not in ("tokens_per_second", "train_nats_per_token", "train_bits_per_byte")
        }
        for record in read(folder / "metrics.jsonl")
    ]
    return found


def difference(folder: Path, reference: dict[str, Any], ignore: tuple[str, ...] = ()) -> str:
    found = outcome(folder)
    names = [n for n in {*found, *reference} if found.get(n) != reference.get(n)]
    return ", ".join(sorted(n for n in names if n not in ignore))


class Failure(Exception):
    """A broken promise."""


def finish(
    home: Path, architecture: str, reference: dict[str, Any], newest: int = 0, two: bool = False
) -> str:
    """Continue as a user would until the run is done, then compare; returns the lines printed.

    `newest`: the step of the last checkpoint before the fault, which must not be lost. `two`: with two
    processes, which are not forks of this one.
    """
    execute, more = (run_new, TWO) if two else (run, [])
    said = []
    for _ in range(4):
        done = execute([*RESUME, *more], home)
        if found := re.search(r"resuming run at step ([\d,]+)", done.out):
            resumed = int(found[1].replace(",", ""))
            if resumed < newest:
                raise Failure(f"checkpoint {newest} is lost, resumed at {resumed}")
        if done.code == 0 or "is finished" in (done.refused or ""):
            break
        line = done.refused
        if line is None:
            raise Failure(f"resume: {done}")
        said.append(line)
        if newest:
            raise Failure(f"checkpoint {newest} is lost: {line}")
        if "no checkpoint yet" in line or "no run at" in line or "no config.toml" in line:
            done = execute([*train_arguments(architecture), *more], home)
            if done.code != 0:
                raise Failure(f"starting again: {done}")
            break
        raise Failure(f"resume: {done}")
    else:
        raise Failure("still not finished")
    if wrong := difference(home / "run", reference):
        raise Failure(f"differs: {wrong}")
    return "; ".join(said)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of one architecture."""

    home: Path
    seconds: float
    operations: int
    """File system operations of one save in the middle."""
    result: dict[str, Any]
    scores: str
    text: str
    of_two: dict[str, Any]
    """The result of two processes, where that is tried."""


def scores_of(done: Done) -> str:
    """An evaluation's result, without its speed."""
    values = json.loads(done.out)
    return json.dumps({k: v for k, v in values.items() if "second" not in k}, sort_keys=True)


def make_reference(root: Path, architecture: str) -> Reference:
    home = root / architecture
    home.mkdir(parents=True)
    words = random.Random(7).choices(["memory", "segment", "the", "of", "a", "\n"], k=4000)
    (home / TEXT).write_text(" ".join(words))
    run(["data", "prepare", TEXT], home)  # so that all runs find prepared tokens
    begin = time.monotonic()
    whole = run(train_arguments(architecture), home)
    seconds = time.monotonic() - begin
    assert whole.code == 0, whole
    result = outcome(home / "run")
    os.rename(home / "run", home / "whole")
    of_two = {}
    if architecture in BY_TWO:
        done = run_new([*train_arguments(architecture), *TWO], home)
        assert done.code == 0, done
        of_two = outcome(home / "run")
        shutil.rmtree(home / "run")
    counted = home / "operations"
    done = 0

    def count(name: str) -> None:
        nonlocal done
        done += 1
        os.write(handle, b".")

    handle = os.open(counted, os.O_WRONLY | os.O_CREAT, 0o644)
    assert (
        run(train_arguments(architecture), home, in_saves(lambda s: s == MIDDLE, count)).code == 0
    )
    shutil.rmtree(home / "run")
    # The run to be damaged was killed in the middle, so that all of its files are in use.
    assert run(train_arguments(architecture), home, stop_at(STOPPED_AT)).code == -signal.SIGKILL
    evaluated = run(EVALUATE, home)
    assert evaluated.code == 0, evaluated
    memory = ["generate", "run", "--tokens", "20", "--seed", "1", "--save-memory", "read.memory"]
    assert run(memory, home).code == 0
    generated = run(GENERATE, home)
    assert generated.code == 0, generated
    return Reference(
        home, seconds, counted.stat().st_size, result, scores_of(evaluated), generated.out, of_two
    )


def fresh(home: Path, reference: Reference, stopped: bool = False) -> None:
    """A place to train in, with or without the run that was stopped."""
    home.mkdir(parents=True)
    for name in ("cache", *(["run", "read.memory"] if stopped else [])):
        # cp keeps hard links, as between the best checkpoint and the published weights.
        subprocess.run(["cp", "-a", str(reference.home / name), str(home)], check=True)
