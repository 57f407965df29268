"""The fault campaign: real training processes are killed, starved, damaged and misled; what is left
must resume to the very weights of an undisturbed run, or be refused in one line.

    python benchmarks/chaos.py [--seed 1] [--workers 2] [--only KIND ...]     -> results/chaos.json

Every trial is seeded and starts processes of its own: forks of this one, which has imported torch
already, that run `memspan train` and the other verbs by the command line's entry. A fault counts as

    survived    the weights, the optimiser, the memory and all scores are bit for bit those of an
                undisturbed run, and no half-written file is left
    refused     a verb ended with status 2 and one line, nothing was changed, and where the line names a
                remedy, that remedy led to the same weights
    failed      anything else: a traceback, another result, a checkpoint that was there and is not

"Torn saves" are cut before each single operation that a save does to the file system (counted first),
by SIGKILL and by an error of the system.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import errno
import itertools
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
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
import torch._dynamo  # which making an optimiser imports: here once, not in every process

from memspan import cli, train
from memspan.metrics import read

RESULTS = Path(__file__).parent / "results" / "chaos.json"
STEPS, SAVE_EVERY, STOPPED_AT = 60, 7, 38
MIDDLE = 4 * SAVE_EVERY
"""A save that also publishes the best weights and drops an old checkpoint."""
LIMIT = 300
"""Seconds after which a process counts as hanging."""
ARCHITECTURES = {
    "transformer-xl": ["--model.memory-length", "16", "--model.dropout", "0.1"],
    "compressive": ["--model.memory-length", "8", "--model.compressed-length", "4"],
    "feedback": ["--model.memory-length", "16"],
    "fast-weights": ["--model.dropout", "0.1"],
}
BY_TWO = ("transformer-xl", "fast-weights")
"""Architectures that two processes train, which takes them longer to start than to train."""
VERDICTS = ("survived", "refused", "failed")


def train_arguments(architecture: str) -> list[str]:
    return [
        *["train", "--model", architecture, "--data.corpus", "text.txt", "--out", "run"],
        *["--model.n-layers", "2", "--model.d-model", "32", "--model.n-heads", "2"],
        *["--model.d-ff", "64", "--optim.warmup-steps", "10"],
        *["--train.batch-size", "4", "--train.segment-length", "16", "--train.device", "cpu"],
        *["--train.steps", str(STEPS), "--train.save-every", str(SAVE_EVERY)],
        *["--train.evaluate-every", "14", "--train.evaluate-tokens", "256"],
        *["--train.sample-tokens", "0", *ARCHITECTURES[architecture]],
    ]


RESUME = ["train", "--resume", "run"]
TWO = ["--nproc", "2"]
MARK = "MEMSPAN_CHAOS"
"""What the processes of one start have in their environment."""
EVALUATE = ["evaluate", "run", "--json", "--tokens", "600", "--segment-length", "16"]
GENERATE = ["generate", "run", "--tokens", "60", "--seed", "3", "--memory", "read.memory"]


# --- processes ---


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


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def refused(self) -> str | None:
        """The line, where it is one and the status is 2."""
        lines = self.err.strip().splitlines()
        one = len(lines) == 1 and lines[0].startswith("memspan: ") and lines[0].isprintable()
        return lines[0] if self.code == 2 and one else None

    def __str__(self) -> str:
        return f"status {self.code}: {self.err.strip()[-400:]}"


numbers = itertools.count()


def start(arguments: list[str], home: Path, hook: Callable[[], None] = lambda: None) -> Process:
    """Fork a `memspan` in `home`; `hook` runs in it first."""
    output = home / f"process-{next(numbers)}"
    pid = os.fork()
    if pid:
        return Process(pid, output)
    code = 70
    try:
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            handle = os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(handle, descriptor)
        os.chdir(home)
        os.environ["MEMSPAN_CACHE"] = str(home / "cache")
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
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


def run(arguments: list[str], home: Path, hook: Callable[[], None] = lambda: None) -> Done:
    return start(arguments, home, hook).wait()


@contextlib.contextmanager
def new_process(arguments: list[str], home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `memspan` of its own, and the mark of what it starts: all of that is killed at the end."""
    mark = f"{home}/{next(numbers)}"
    process = subprocess.Popen(
        [sys.executable, "-m", "memspan", *arguments],
        cwd=home,
        env=os.environ | {"MEMSPAN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1", MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, mark
    finally:
        for pid in started_by(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def started_by(mark: str) -> dict[int, dict[str, str]]:
    """The living processes that a `memspan` has started, and itself, with their environments.

    The launcher gives each a session of its own, so they are known by what they inherit.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                content = (entry / "environ").read_bytes().decode(errors="replace")
                values = dict(v.split("=", 1) for v in content.split("\0") if "=" in v)
                if values.get(MARK) == mark:
                    found[int(entry.name)] = values
    return found


def ended(process: subprocess.Popen[str], seconds: float = LIMIT) -> Done:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Done(-1, "", f"hangs: not done after {seconds} s")
    return Done(process.returncode, out, err)


def run_new(arguments: list[str], home: Path) -> Done:
    with new_process(arguments, home) as (process, _):
        return ended(process)


# --- faults inside a process ---


def at_operations(before: Callable[[str], None]) -> None:
    """Call `before` ahead of everything that this process does to a file system to write."""

    def wrapped(name: str, original: Any) -> Any:
        def operation(*arguments: Any, **options: Any) -> Any:
            before(name)
            return original(*arguments, **options)

        return operation

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            before("open")
        return original_open(path, mode, *arguments, **options)

    original_open = builtins.open
    for name in ("replace", "link", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, wrapped(name, getattr(os, name)))
    builtins.open = opened  # type: ignore[assignment]


def in_saves(which: Callable[[int], bool], fault: Callable[[str], None]) -> Callable[[], None]:
    """A hook: `fault` at every operation of the saves at the steps that `which` picks."""

    def hook() -> None:
        inside = False

        def before(name: str) -> None:
            if inside:
                fault(name)

        def save(self: train.Trainer) -> None:
            nonlocal inside
            inside = which(self.step)
            original(self)
            inside = False

        original = train.Trainer.save
        train.Trainer.save = save  # type: ignore[method-assign]
        at_operations(before)

    return hook


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, fault: Callable[[str], None], lasting: bool = False) -> Callable[[str], None]:
    """`fault` at the operation after `count` others, or at all from there on."""
    done = 0

    def before(name: str) -> None:
        nonlocal done
        if done == count or (lasting and done > count):
            fault(name)
        done += 1

    return before


def failing(number: int) -> Callable[[str], None]:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault


def stop_at(step: int) -> Callable[[], None]:
    def hook() -> None:
        original = train.Trainer.update

        def update(self: train.Trainer) -> Any:
            if self.step == step:
                die()
            return original(self)

        train.Trainer.update = update  # type: ignore[method-assign]

    return hook


# --- what a run comes to ---


def steps_of(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in folder.glob("checkpoints/step-*"))


def outcome(folder: Path) -> dict[str, Any]:
    """All of a run that must not depend on what happened to it."""
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
    """A promise that was not kept."""


def finish(
    home: Path, architecture: str, reference: dict[str, Any], newest: int = 0, two: bool = False
) -> str:
    """Go on as a user would until the run is done, then compare; what was said on the way.

    `newest`: the step of the last checkpoint before the fault, which must not be lost. `two`: by two
    processes, which are no forks of this one.
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


# --- the campaign ---


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of one architecture."""

    home: Path
    seconds: float
    operations: int
    """Of one save in the middle."""
    result: dict[str, Any]
    scores: str
    text: str
    of_two: dict[str, Any]
    """What two processes come to, where that is tried."""


@dataclass(frozen=True)
class Trial:
    kind: str
    detail: str
    seed: int
    architecture: str
    test: Callable[[Path, Reference, str, random.Random], str]
    """Returns the verdict; raises Failure."""


def scores_of(done: Done) -> str:
    """What an evaluation came to, without its speed."""
    values = json.loads(done.out)
    return json.dumps({k: v for k, v in values.items() if "second" not in k}, sort_keys=True)


def make_reference(root: Path, architecture: str) -> Reference:
    home = root / architecture
    home.mkdir(parents=True)
    words = random.Random(7).choices(["memory", "segment", "the", "of", "a", "\n"], k=4000)
    (home / "text.txt").write_text(" ".join(words))
    run(["data", "prepare", "text.txt"], home)  # so that all runs find the tokens prepared
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
    # The run that damage is done to was killed in the middle, so that all of its files are in use.
    assert run(train_arguments(architecture), home, stop_at(STOPPED_AT)).code == -signal.SIGKILL
    (home / "run" / ".lock").unlink(missing_ok=True)
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
    for name in ("text.txt", "cache", *(["run", "read.memory"] if stopped else [])):
        # cp keeps hard links, as between the best checkpoint and the published weights.
        subprocess.run(["cp", "-a", str(reference.home / name), str(home)], check=True)


def kill_at_any_moment(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    fresh(home, reference)
    arguments, newest = train_arguments(name), 0
    for _ in range(draw.choice([1, 1, 2])):
        process = start(arguments, home)
        time.sleep(draw.uniform(0.02, 0.95) * reference.seconds)
        newest = max([newest, *steps_of(home / "run")])
        process.kill()
        if not (home / "run" / "config.toml").exists():
            newest = 0
            break
        arguments = RESUME
    finish(home, name, reference.result, newest)
    return "survived"


def kill_in_a_save(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """Before a random operation of a random save, and again while resuming."""
    fresh(home, reference)
    arguments = train_arguments(name)
    for _ in range(2):
        count = draw.randrange(reference.operations * STEPS // SAVE_EVERY)
        run(arguments, home, in_saves(lambda step: True, after(count, die)))
        arguments = RESUME
    newest = max(steps_of(home / "run"), default=0)
    finish(home, name, reference.result, newest)
    return "survived"


def torn_by(number: int | None, at: int) -> Callable[..., str]:
    """A save that is cut before operation `at` by SIGKILL (None) or fails there with `number`."""

    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference)
        fault = die if number is None else failing(number)
        done = run(
            train_arguments(name), home, in_saves(lambda s: s == MIDDLE, after(at, fault, True))
        )
        expected = (
            done.code == -signal.SIGKILL
            if number is None
            else (done.refused is not None or done.code == 0)
        )
        if not expected:
            raise Failure(str(done))
        finish(home, name, reference.result, newest=MIDDLE - SAVE_EVERY)
        return "survived" if number is None or done.code == 0 else "refused"

    return test


def full_disk(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    fresh(home, reference)
    size = sum(p.stat().st_size for p in (reference.home / "whole").rglob("*") if p.is_file())
    disk = home / "run"
    disk.mkdir()
    # The system counts in pages, and renaming needs no space: from nothing to nearly enough.
    pages = 1 + draw.randrange(int(0.95 * size) // 4096)
    with mounted("tmpfs", disk, f"size={4096 * pages}"):
        done = run(train_arguments(name), home)
        newest = max(steps_of(disk), default=0)
        if done.refused is None:
            raise Failure(str(done))
        mount("-o", "remount,size=100m", str(disk))
        finish(home, name, reference.result, newest)
    return "refused"


def file_size_limit(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """Where mounting is not allowed: no file may grow beyond a limit."""
    fresh(home, reference)
    largest = max(p.stat().st_size for p in (reference.home / "whole").rglob("*") if p.is_file())
    limit = draw.randrange(1, largest)
    done = run(
        train_arguments(name),
        home,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    if done.refused is None:
        raise Failure(str(done))
    finish(home, name, reference.result, max(steps_of(home / "run"), default=0))
    return "refused"


def read_only(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """A read-only mount: using the run works, training on is refused, and works again after."""
    fresh(home, reference, stopped=True)
    before, newest = outcome(home / "run"), max(steps_of(home / "run"))
    with mounted("bind", home / "run", ""):
        mount("-o", "remount,bind,ro", str(home / "run"))
        if scores_of(run(EVALUATE, home)) != reference.scores:
            raise Failure("the evaluation differs")
        verb = draw.choice([RESUME, train_arguments(name)])
        done = run(verb, home)
        if done.refused is None:
            raise Failure(str(done))
    if wrong := difference(home / "run", before):
        raise Failure(f"changed though read-only: {wrong}")
    finish(home, name, reference.result, newest)
    return "refused"


def becomes_read_only(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """The checkpoints' folder is made immutable while training writes there."""
    fresh(home, reference)
    process = start(train_arguments(name), home)
    folder, end = home / "run" / "checkpoints", time.monotonic() + LIMIT
    while len(steps_of(home / "run")) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3) * reference.seconds)
    subprocess.run(["chattr", "+i", str(folder)], check=True)
    try:
        done, newest = process.wait(), max(steps_of(home / "run"))
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    if done.refused is None and done.code != 0:
        raise Failure(str(done))
    finish(home, name, reference.result, newest)
    return "refused" if done.code else "survived"


def fails_from(number: int) -> Callable[..., str]:
    """From a random operation on every further one fails, the clean-up's too."""

    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference)
        count = draw.randrange(reference.operations * STEPS // SAVE_EVERY)

        def hook() -> None:
            at_operations(after(count, failing(number), lasting=True))

        done = run(train_arguments(name), home, hook)
        if done.refused is None and done.code != 0:
            raise Failure(str(done))
        (home / "run" / ".lock").unlink(missing_ok=True)
        finish(home, name, reference.result, max(steps_of(home / "run"), default=0))
        return "refused" if done.code else "survived"

    return test


def damage(path: Path, how: str, draw: random.Random) -> None:
    """In place, as a disk does it: every name of the file sees it."""
    content = bytearray(path.read_bytes())
    if how == "flip":
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    else:
        del content[draw.randrange(len(content)) :]
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


def damaged(file: str, how: str) -> Callable[..., str]:
    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference, stopped=True)
        path = sorted(home.glob(file))[-1]
        damage(path, how, draw)
        refusals = []
        for arguments, expected, read_out in (
            (EVALUATE, reference.scores, scores_of),
            (GENERATE, reference.text, lambda done: done.out),
        ):
            done = run(arguments, home)
            if done.code == 0 and read_out(done) != expected:
                raise Failure(f"{arguments[0]} differs silently")
            if done.code != 0 and done.refused is None:
                raise Failure(f"{arguments[0]}: {done}")
            refusals += [done.refused] if done.code else []
        done = run(RESUME, home)
        if done.code == 0:
            told = "metrics.jsonl is not as it was saved" in " ".join(done.out.split())
            ignore = ("metrics",) if told else ()
            if wrong := difference(home / "run", reference.result, ignore):
                raise Failure(f"resumed to another result: {wrong}")
            return "refused" if refusals or told else "survived"
        if done.refused is None:
            raise Failure(f"resume: {done}")
        if move := re.search(r"or move (\S+) away", done.refused):
            shutil.move(home / move[1], home / "away")
            finish(home, name, reference.result)
        elif "checkpoints" in str(path):
            raise Failure(f"no way back is named: {done.refused}")
        return "refused"

    return test


def second_trainer(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """While one trains, a second is refused; when the first is killed, a third goes on at once."""
    fresh(home, reference)
    first = start(train_arguments(name), home)
    while not steps_of(home / "run"):
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.3) * reference.seconds)
    os.kill(first.pid, signal.SIGSTOP)  # so that it surely trains still
    for arguments in (RESUME, train_arguments(name)):
        done = run(arguments, home)
        if "another process is training" not in (done.refused or ""):
            raise Failure(str(done))
    os.kill(first.pid, signal.SIGCONT)
    newest = max(steps_of(home / "run"))
    if draw.random() < 0.5:
        first.kill()
    elif (done := first.wait()).code != 0:
        raise Failure(str(done))
    finish(home, name, reference.result, newest)
    return "refused"


def started_together(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    fresh(home, reference)
    both = [start(train_arguments(name), home) for _ in range(2)]
    done = [process.wait() for process in both]
    if sorted(d.code for d in done) != [0, 2] or not any(d.refused for d in done):
        raise Failure("; ".join(map(str, done)))
    if wrong := difference(home / "run", reference.result):
        raise Failure(f"differs: {wrong}")
    return "refused"


def kill_of_two(which: str) -> Callable[..., str]:
    """SIGKILL to one of two processes, or to the one that launched them. Nothing may be left over."""

    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference)
        with new_process([*train_arguments(name), *TWO], home) as (process, mark):
            end, wanted = time.monotonic() + LIMIT, draw.randrange(1, 4)
            while len(steps_of(home / "run")) < min(wanted, 2) and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.4))
            newest = max(steps_of(home / "run"), default=0)
            ranks = [pid for pid, values in started_by(mark).items() if "RANK" in values]
            if len(ranks) < 2:
                raise Failure(f"{len(ranks)} processes at work: {ended(process, 1)}")
            victim = process.pid if which == "launcher" else draw.choice(sorted(ranks))
            os.kill(victim, signal.SIGKILL)
            done = ended(process)
            lines = done.err.strip().splitlines()
            if which != "launcher" and (done.code == 0 or len(lines) != 1):
                raise Failure(f"the launcher: {done}")
            end = time.monotonic() + 90
            while left := started_by(mark):
                if time.monotonic() > end:
                    raise Failure(f"{len(left)} processes are left after 90 s")
                time.sleep(0.1)
        finish(home, name, reference.of_two, newest, two=True)
        return "survived"

    return test


def jumping_clock(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """The time of day jumps by years at every look, files carry dates of any year."""
    fresh(home, reference)

    def hook() -> None:
        seconds, jumps = time.time, random.Random(draw.random())
        time.time = lambda: max(0.0, seconds() + jumps.uniform(-40, 40) * 3.15e7)
        time.time_ns = lambda: int(time.time() * 1e9)

    process = start(train_arguments(name), home, hook)
    time.sleep(draw.uniform(0.3, 0.9) * reference.seconds)
    newest = max(steps_of(home / "run"), default=0)
    process.kill()
    for path in home.rglob("*"):
        if path.is_file():
            os.utime(path, (draw.uniform(0, 4e9), draw.uniform(0, 4e9)))
    done = run(RESUME, home, hook) if newest else run(train_arguments(name), home, hook)
    if done.code != 0 and "is finished" not in (done.refused or ""):
        raise Failure(str(done))
    finish(home, name, reference.result)
    return "survived"


# --- mounting ---


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(kind: str, place: Path, options: str) -> Iterator[None]:
    if kind == "bind":
        mount("--bind", str(place), str(place))
    else:
        mount("-t", kind, "-o", options, "none", str(place))
    try:
        yield
        if kind == "tmpfs":
            shutil.copytree(place, place.with_name("kept"))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def own_mounts() -> bool:
    """Give this process mounts of its own, which end with it; whether that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(0x20000) != 0:
        return False
    try:
        mount("--make-rprivate", "/")
        with tempfile.TemporaryDirectory() as folder, mounted("bind", Path(folder), ""):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def can_be_immutable(root: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            for flag in ("+i", "-i"):
                subprocess.run(["chattr", flag, folder], check=True, capture_output=True)
        except (subprocess.CalledProcessError, OSError):
            return False
    return True


# --- all of it ---

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


def plan(seed: int, mounts: bool, immutable: bool, operations: dict[str, int]) -> list[Trial]:
    names = itertools.cycle(ARCHITECTURES)
    draw = random.Random(seed)
    trials: list[Trial] = []

    two = itertools.cycle(BY_TWO)

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
    add("second trainer", second_trainer, 6)
    add("two started together", started_together, 6)
    add("clock jumps", jumping_clock, 8)
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
    # As where the extra is not installed: a picture takes longer than these runs.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    begin = time.monotonic()
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
