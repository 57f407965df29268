"""A function for each kind of fault: it returns the verdict, or raises :class:`faults.runs.Failure`."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from faults.injection import after, at_operations, die, failing, in_saves
from faults.mounts import mount, mounted
from faults.processes import LIMIT, Process, ended, new_process, run, start, started_by
from faults.runs import (
    EVALUATE,
    GENERATE,
    MIDDLE,
    RESUME,
    SAVE_EVERY,
    STEPS,
    TEXT,
    TWO,
    Failure,
    Reference,
    difference,
    finish,
    fresh,
    outcome,
    scores_of,
    steps_of,
    train_arguments,
)


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
    """A save that is killed before operation `at` (`number` None) or fails there with `number`."""

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
    # The system counts in pages, and renaming needs no space: from none to almost enough.
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
    """A read-only mount: the run can be used, resuming is refused, and works again afterwards."""
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
    """From a random operation on, all operations fail, including those of the clean-up."""

    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference)
        count = draw.randrange(reference.operations * STEPS // SAVE_EVERY)

        def hook() -> None:
            at_operations(after(count, failing(number), lasting=True))

        done = run(train_arguments(name), home, hook)
        if done.refused is None and done.code != 0:
            raise Failure(str(done))
        finish(home, name, reference.result, max(steps_of(home / "run"), default=0))
        return "refused" if done.code else "survived"

    return test


def damage(path: Path, how: str, draw: random.Random) -> None:
    """In place, as on a failing disk: all hard links of the file are affected."""
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
            # Training does not depend on its records.
            ignore = ("metrics",) if path.name == "metrics.jsonl" else ()
            if wrong := difference(home / "run", reference.result, ignore):
                raise Failure(f"resumed to another result: {wrong}")
            return "refused" if refusals else "survived"
        if done.refused is None:
            raise Failure(f"resume: {done}")
        if move := re.search(r"or move (\S+) away", done.refused):
            shutil.move(home / move[1], home / "away")
            finish(home, name, reference.result)
        elif "checkpoints" in str(path):
            raise Failure(f"no way back is named: {done.refused}")
        return "refused"

    return test


def training_until(home: Path, name: str, draw: random.Random) -> Process:
    """A training process, stopped (SIGSTOP) after a few checkpoints."""
    process = start(train_arguments(name), home)
    wanted, end = draw.randrange(1, 6) * SAVE_EVERY, time.monotonic() + LIMIT
    while max(steps_of(home / "run"), default=0) < wanted:
        if time.monotonic() > end:
            raise Failure(f"no checkpoint after {LIMIT} s: {process.kill()}")
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    return process


def moved_while_training(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """Another run takes the folder's name: it is left alone, and the trainer stops."""
    fresh(home, reference)
    process = training_until(home, name, draw)
    folder, newest = home / "run", max(steps_of(home / "run"))
    folder.rename(home / "moved")
    if replaced := draw.random() < 0.7:
        shutil.copytree(reference.home / "whole", folder)
    os.kill(process.pid, signal.SIGCONT)
    done = process.wait()
    if "was moved, deleted or replaced" not in (done.refused or ""):
        raise Failure(str(done))
    if replaced:
        if wrong := difference(folder, reference.result):
            raise Failure(f"the other run was changed: {wrong}")
        shutil.rmtree(folder)
    if folder.exists():
        raise Failure("the folder was made again")
    (home / "moved").rename(folder)
    finish(home, name, reference.result, newest)
    return "refused"


def corpus_changed(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """One byte of the text, in any split, or a border between two documents, is changed."""
    fresh(home, reference, stopped=True)
    content = bytearray((home / TEXT).read_bytes())
    texts = home / "texts"
    texts.mkdir()
    if draw.random() < 0.3:
        cut = draw.randrange(1, len(content))
        (texts / "a.txt").write_bytes(content[:cut])
        (texts / "b.txt").write_bytes(content[cut:])
    else:
        # Half of them outside the training text.
        low = draw.choice([0, len(content) * 9 // 10])
        content[draw.randrange(low, len(content))] ^= 1
        (texts / "a.txt").write_bytes(content)
    before, newest = outcome(home / "run"), max(steps_of(home / "run"))
    done = run([*RESUME, "--data.corpus", "texts"], home)
    if "is not what this run was trained on" not in (done.refused or ""):
        raise Failure(str(done))
    if wrong := difference(home / "run", before):
        raise Failure(f"changed though refused: {wrong}")
    finish(home, name, reference.result, newest)
    return "refused"


def spoiled_code(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """A file of compiled code is damaged or replaced: it is compiled again, and a line says so."""
    fresh(home, reference)
    path = draw.choice(sorted(home.glob("cache/code-*/*")))
    how = draw.choice(["bit", "gone", "pipe", "endless", "writable"])
    if how == "bit":
        damage(path, "flip", draw)
    elif how == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    (path.parent / "tmpleft").mkdir()
    done = run(train_arguments(name), home)
    if done.code != 0 or "compiling" not in done.err:
        raise Failure(f"{how} {path.name}: {done}")
    if (path.parent / "tmpleft").exists():
        raise Failure("what a killed compilation left is still there")
    finish(home, name, reference.result)
    return "survived"


def untrusted_code(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """The folder of compiled code is open to others, or a link: it is not used; a line says so."""
    fresh(home, reference)
    (folder,) = home.glob("cache/code-*")
    if draw.choice([True, False]):
        folder.chmod(0o777)
    else:
        folder.rename(home / "elsewhere")
        folder.symlink_to(home / "elsewhere")
    done = run(train_arguments(name), home)
    lines = [line for line in done.err.splitlines() if "compiled code cannot be kept" in line]
    if done.code != 0 or len(lines) != 1:
        raise Failure(str(done))
    # PyTorch's loops round differently: the weights must be those of a reference run that uses them.
    shutil.rmtree(home / "run")
    shutil.rmtree(home / "cache")
    subprocess.run(["cp", "-a", str(reference.home / "cache"), str(home)], check=True)
    done = run(train_arguments(name), home)
    if done.code != 0:
        raise Failure(str(done))
    finish(home, name, reference.result)
    return "refused"


def second_trainer(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """While one trains, a second is refused; when the first is killed, a third continues at once."""
    fresh(home, reference)
    first = start(train_arguments(name), home)
    checkpoints, end = draw.randrange(1, 5), time.monotonic() + LIMIT
    while max(steps_of(home / "run"), default=0) < checkpoints * SAVE_EVERY:
        if time.monotonic() > end:
            raise Failure(f"no checkpoint after {LIMIT} s: {first.kill()}")
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGSTOP)  # so that it is certainly still training
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
    """SIGKILL to one of two processes, or to their launcher. No process may be left."""

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


def output_that_fails(how: str) -> Callable[..., str]:
    """Standard output's reader exits after a few lines, its disk is full, or its encoding lacks
    the characters that are printed."""

    def test(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
        fresh(home, reference)
        folder, lines = "run ∞", draw.randrange(4)

        def hook() -> None:
            if how == "head":
                head = subprocess.Popen(["head", "-n", f"{lines}"], stdin=subprocess.PIPE)
                assert head.stdin is not None
                os.dup2(head.stdin.fileno(), 1)
            elif how == "/dev/full":
                os.dup2(os.open(how, os.O_WRONLY), 1)
            encoding = None if how in ("head", "/dev/full") else how
            sys.stdout = os.fdopen(os.dup(1), "w", encoding=encoding)

        arguments = [folder if a == "run" else a for a in train_arguments(name)]
        done = run(arguments, home, hook)
        if done.code != 0 or len(done.err.splitlines()) > 1:
            raise Failure(str(done))
        os.rename(home / folder, home / "run")
        if wrong := difference(home / "run", reference.result):
            raise Failure(f"differs: {wrong}")
        done = run(EVALUATE, home, hook)
        if done.refused is None and (done.code != 0 or done.err):
            raise Failure(f"evaluate: {done}")
        return "survived"

    return test


def jumping_clock(home: Path, reference: Reference, name: str, draw: random.Random) -> str:
    """The clock jumps by years whenever it is read, and files have dates of any year."""
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
