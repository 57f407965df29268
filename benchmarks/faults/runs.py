"""The runs that faults are applied to, in forks of this process, which has already imported torch: how
they are trained, and how they continue."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memspan.lab import cli
from memspan.lab.training.metrics import read
from memspan.lab.training.updates import Updater

LIMIT = 300
"""Seconds after which a process counts as hanging."""
STEPS = 60
SAVE_EVERY = 7
STOPPED_AT = 38
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
RESUME = ["train", "--resume", "run"]
EVALUATE = ["evaluate", "run", "--json", "--tokens", "600", "--segment-length", "16"]
GENERATE = ["generate", "run", "--tokens", "60", "--seed", "3", "--memory", "read.memory"]


class Failure(Exception):
    """A broken promise."""


@dataclass
class Done:
    """A finished `memspan`: its status and its output."""

    code: int
    out: str
    err: str

    @property
    def refused(self) -> str:
        """The line, if there is exactly one and the status is 2."""
        lines = self.err.strip().splitlines()
        one = len(lines) == 1 and lines[0].startswith("memspan: ") and lines[0].isprintable()
        return lines[0] if self.code == 2 and one else ""

    def must(self, kept: bool) -> None:
        """Raise :class:`Failure` unless a promise was kept."""
        if not kept:
            raise Failure(f"status {self.code}: {self.err.strip()[-400:]}")


@dataclass
class Process:
    """A forked `memspan`: its id and where its output goes."""

    pid: int
    output: Path

    def wait(self) -> Done:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                out, err = (self.output.with_suffix(s).read_text() for s in (".out", ".err"))
                return Done(os.waitstatus_to_exitcode(status), out, err)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return Done(-1, "", f"hangs: not done after {LIMIT} s")

    def kill(self) -> Done:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


numbers = itertools.count()


def nothing() -> None:
    """No fault."""


@dataclass
class Place:
    """A folder in which an architecture is trained, as ``run``."""

    home: Path
    architecture: str

    @property
    def folder(self) -> Path:
        return self.home / "run"

    def training(self) -> list[str]:
        """The command that starts the run."""
        return [
            *["train", "--model", self.architecture, "--data.corpus", TEXT, "--out", "run"],
            *["--model.n-layers", "2", "--model.d-model", "32", "--model.n-heads", "2"],
            *["--model.d-ff", "64", "--optim.warmup-steps", "10"],
            *["--train.batch-size", "4", "--train.segment-length", "16", "--train.device", "cpu"],
            *["--train.steps", str(STEPS), "--train.save-every", str(SAVE_EVERY)],
            *["--train.evaluate-every", "14", "--train.evaluate-tokens", "256"],
            *["--train.sample-tokens", "0", *ARCHITECTURES[self.architecture]],
        ]

    def start(self, arguments: list[str], hook: Callable[[], None] = nothing) -> Process:
        """Fork a `memspan`; ``hook`` runs in it first."""
        output = self.home / f"process-{next(numbers)}"
        pid = os.fork()
        if pid:
            return Process(pid, output)
        code = 70
        try:
            for descriptor, suffix in ((1, ".out"), (2, ".err")):
                handle = os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT, 0o644)
                os.dup2(handle, descriptor)
            os.chdir(self.home)
            os.environ["MEMSPAN_CACHE"] = str(self.home / "cache")
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            torch.set_num_threads(1)
            hook()
            cli.main(arguments)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def run(self, arguments: list[str], hook: Callable[[], None] = nothing) -> Done:
        return self.start(arguments, hook).wait()

    def steps(self) -> list[int]:
        """Names of its checkpoints."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("checkpoints/step-*"))

    def newest(self) -> int:
        return max(self.steps(), default=0)

    def wait_for(self, step: int, process: Process) -> None:
        """Until there is a checkpoint of that step or a later one."""
        end = time.monotonic() + LIMIT
        while self.newest() < step:
            if time.monotonic() > end:
                process.kill().must(False)
            time.sleep(0.005)

    def outcome(self) -> dict[str, Any]:
        """Everything about the run that must not depend on what happened to it."""
        folder = self.folder
        found: dict[str, Any] = {
            p.relative_to(folder).as_posix(): p.read_bytes()
            for p in folder.rglob("*")
            if p.suffix in (".safetensors", ".toml")
            or p.name in ("tokenizer.json", "state.json")
            or p.name[0] == "."
        }
        differing = ("tokens_per_second", "train_nats_per_token", "train_bits_per_byte")
        found["metrics"] = [
            {key: value for key, value in record.items() if key not in differing}
            for record in read(folder / "metrics.jsonl")
        ]
        return found

    def must_be(self, expected: dict[str, Any], ignore: str = "") -> None:
        """Raise :class:`Failure` if the run has another outcome."""
        found = self.outcome()
        names = {n for n in {*found, *expected} if found.get(n) != expected.get(n)} - {ignore}
        if names:
            raise Failure(f"differs: {', '.join(sorted(names))}")

    def finish(self, expected: dict[str, Any], newest: int = 0) -> None:
        """Continue as a user would until the run is done, then compare.

        Args:
            expected: the outcome.
            newest: the step of the last checkpoint before the fault, which must not be lost.
        """
        done = self.run(RESUME)
        if found := re.search(r"resuming run at step ([\d,]+)", done.out):
            resumed = int(found[1].replace(",", ""))
            if resumed < newest:
                raise Failure(f"checkpoint {newest} is lost, resumed at {resumed}")
        if done.code != 0 and "is finished" not in done.refused:
            begin = ("no checkpoint yet", "no run at", "no config.toml")
            done.must(not newest and any(line in done.refused for line in begin))
            done = self.run(self.training())
            done.must(done.code == 0)
        self.must_be(expected)


def stop() -> None:
    """A hook that kills the process before the update after ``STOPPED_AT`` steps."""
    original = Updater.update

    def update(self: Updater) -> Any:
        if self.state.step == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    Updater.update = update  # type: ignore[method-assign]


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of one architecture."""

    home: Path
    seconds: float
    operations: int
    """File system operations of one save in the middle."""
    n_bytes: int
    result: dict[str, Any]
    scores: str
    text: str


def scores_of(done: Done) -> str:
    """An evaluation's result, without its speed."""
    values = json.loads(done.out)
    return json.dumps({k: v for k, v in values.items() if "second" not in k}, sort_keys=True)


def make_reference(
    root: Path, architecture: str, count_operations: Callable[[int], Callable[[], None]]
) -> Reference:
    """Train it undisturbed, and leave a run that was stopped in the middle.

    Args:
        root: the folder of all trials.
        architecture: what to train.
        count_operations: given a descriptor, a hook that writes a byte to it at every operation of the
            save at ``MIDDLE``.
    """
    place = Place(root / architecture, architecture)
    place.home.mkdir(parents=True)

    def trained(arguments: list[str], hook: Callable[[], None] = nothing) -> Done:
        done = place.run(arguments, hook)
        done.must(done.code == 0)
        return done

    def result() -> dict[str, Any]:
        found = place.outcome()
        place.folder.rename(place.home / f"done-{next(numbers)}")
        return found

    words = random.Random(7).choices(["memory", "segment", "the", "of", "a", "\n"], k=4000)
    (place.home / TEXT).write_text(" ".join(words))
    trained(["data", "prepare", TEXT])  # so that all runs find prepared tokens
    begin = time.monotonic()
    trained(place.training())
    seconds = time.monotonic() - begin
    n_bytes = sum(p.stat().st_size for p in place.folder.rglob("*") if p.is_file())
    whole = result()
    counted = place.home / "operations"
    trained(place.training(), count_operations(os.open(counted, os.O_WRONLY | os.O_CREAT, 0o644)))
    result()
    # The run to be damaged was killed in the middle, so that all of its files are in use.
    place.start(place.training(), stop).wait()
    scores = scores_of(trained(EVALUATE))
    trained(["generate", "run", "--tokens", "20", "--seed", "1", "--save-memory", "read.memory"])
    text = trained(GENERATE).out
    operations = counted.stat().st_size
    return Reference(place.home, seconds, operations, n_bytes, whole, scores, text)
