"""A function for each kind of fault: it returns the verdict, or raises :class:`faults.runs.Failure`."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faults.runs import (
    EVALUATE,
    GENERATE,
    MIDDLE,
    RESUME,
    SAVE_EVERY,
    STEPS,
    Failure,
    Place,
    Reference,
    scores_of,
)
from memspan.lab.training.trainer import Checkpointer

Fault = Callable[[str], None]
"""Called at an operation of the file system, with its name."""


@dataclass
class Trial(Place):
    """A place with an undisturbed run beside it, and the draws of this trial."""

    reference: Reference
    draw: random.Random

    def prepare(self, stopped: bool = False) -> None:
        """A place to train in, with or without the run that was stopped."""
        self.home.mkdir(parents=True)
        for name in ("cache", *(["run", "read.memory"] if stopped else [])):
            # cp keeps hard links, as between the best checkpoint and the published weights.
            source = str(self.reference.home / name)
            subprocess.run(["cp", "-a", source, str(self.home)], check=True)

    def resume(self, newest: int = 0) -> None:
        self.finish(self.reference.result, newest)


def at_operations(before: Fault) -> None:
    """Call ``before`` ahead of every write operation of this process on a file system."""

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


def in_saves(fault: Fault, step: int | None = None) -> Callable[[], None]:
    """A hook: ``fault`` at every operation of all saves, or of the one at this step."""

    def hook() -> None:
        inside = False

        def before(name: str) -> None:
            if inside:
                fault(name)

        def save(self: Checkpointer) -> None:
            nonlocal inside
            inside = step in (None, self._state.step)
            original(self)
            inside = False

        original = Checkpointer.save
        Checkpointer.save = save  # type: ignore[method-assign]
        at_operations(before)

    return hook


def count_operations(descriptor: int) -> Callable[[], None]:
    """A hook that writes a byte for every operation of the save in the middle."""

    def count(name: str) -> None:
        os.write(descriptor, b".")

    return in_saves(count, MIDDLE)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Fault:
    def fault(name: str) -> None:
        raise OSError(number, os.strerror(number))

    return fault


def after(count: int, fault: Fault) -> Fault:
    """``fault`` at the operation after ``count`` others and at all later ones."""
    done = 0

    def before(name: str) -> None:
        nonlocal done
        if done >= count:
            fault(name)
        done += 1

    return before


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(kind: str, place: Path, options: str = "") -> Iterator[None]:
    if kind == "bind":
        mount("--bind", str(place), str(place))
    else:
        mount("-t", kind, "-o", options, "none", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def own_mounts() -> bool:
    """Give this process its own mounts, which end with it; returns whether that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(0x20000) != 0:
        return False
    try:
        mount("--make-rprivate", "/")
        with tempfile.TemporaryDirectory() as folder, mounted("bind", Path(folder)):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def kill_at_any_moment(trial: Trial) -> str:
    trial.prepare()
    arguments = trial.training()
    newest = 0
    for _ in range(trial.draw.choice([1, 1, 2])):
        process = trial.start(arguments)
        time.sleep(trial.draw.uniform(0.02, 0.95) * trial.reference.seconds)
        newest = max(newest, trial.newest())
        process.kill()
        if not (trial.folder / "config.toml").exists():
            newest = 0
            break
        arguments = RESUME
    trial.resume(newest)
    return "survived"


def kill_in_a_save(trial: Trial) -> str:
    """Before a random operation of a random save, and again while resuming."""
    trial.prepare()
    for arguments in (trial.training(), RESUME):
        count = trial.draw.randrange(trial.reference.operations * STEPS // SAVE_EVERY)
        trial.run(arguments, in_saves(after(count, die)))
    trial.resume(trial.newest())
    return "survived"


def torn_by(number: int | None, at: int, trial: Trial) -> str:
    """A save that is killed before operation ``at`` (``number`` None) or fails there with it."""
    trial.prepare()
    fault = die if number is None else failing(number)
    done = trial.run(trial.training(), in_saves(after(at, fault), MIDDLE))
    killed = done.code == -signal.SIGKILL
    done.must(killed if number is None else bool(done.refused) or done.code == 0)
    trial.resume(newest=MIDDLE - SAVE_EVERY)
    return "refused" if done.refused else "survived"


def full_disk(trial: Trial) -> str:
    trial.prepare()
    trial.folder.mkdir()
    # The system counts in pages, and renaming needs no space: from none to almost enough.
    pages = 1 + trial.draw.randrange(int(0.95 * trial.reference.n_bytes) // 4096)
    with mounted("tmpfs", trial.folder, f"size={4096 * pages}"):
        done = trial.run(trial.training())
        done.must(bool(done.refused))
        mount("-o", "remount,size=100m", str(trial.folder))
        trial.resume(trial.newest())
    return "refused"


def read_only(trial: Trial) -> str:
    """A read-only mount: the run can be used, resuming is refused, and works again afterwards."""
    trial.prepare(stopped=True)
    before = trial.outcome()
    with mounted("bind", trial.folder):
        mount("-o", "remount,bind,ro", str(trial.folder))
        done = trial.run(EVALUATE)
        done.must(done.code == 0 and scores_of(done) == trial.reference.scores)
        done = trial.run(trial.draw.choice([RESUME, trial.training()]))
        done.must(bool(done.refused))
    trial.must_be(before)
    trial.resume(trial.newest())
    return "refused"


def fails_from(number: int, trial: Trial) -> str:
    """From a random operation on, all operations fail, including those of the clean-up."""
    trial.prepare()
    count = trial.draw.randrange(trial.reference.operations * STEPS // SAVE_EVERY)
    done = trial.run(trial.training(), lambda: at_operations(after(count, failing(number))))
    done.must(bool(done.refused) or done.code == 0)
    trial.resume(trial.newest())
    return "refused" if done.code else "survived"


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


def damaged(file: str, how: str, trial: Trial) -> str:
    trial.prepare(stopped=True)
    path = sorted(trial.home.glob(file))[-1]
    damage(path, how, trial.draw)
    refused = False
    for arguments, expected, read_out in (
        (EVALUATE, trial.reference.scores, scores_of),
        (GENERATE, trial.reference.text, lambda done: done.out),
    ):
        done = trial.run(arguments)
        done.must(bool(done.refused) or done.code == 0)
        if done.code == 0 and read_out(done) != expected:
            raise Failure(f"{arguments[0]} differs silently")
        refused |= done.code != 0
    done = trial.run(RESUME)
    if done.code == 0:
        # Training does not depend on its records.
        trial.must_be(trial.reference.result, "metrics" if path.name == "metrics.jsonl" else "")
        return "refused" if refused else "survived"
    done.must(bool(done.refused))
    if move := re.search(r"or move (\S+) away", done.refused):
        shutil.move(trial.home / move[1], trial.home / "away")
        trial.resume()
    elif "checkpoints" in str(path):
        raise Failure(f"no way back is named: {done.refused}")
    return "refused"


def second_trainer(trial: Trial) -> str:
    """While one trains, a second is refused; when the first is killed, a third continues at once."""
    trial.prepare()
    first = trial.start(trial.training())
    trial.wait_for(trial.draw.randrange(1, 5) * SAVE_EVERY, first)
    os.kill(first.pid, signal.SIGSTOP)  # so that it is certainly still training
    for arguments in (RESUME, trial.training()):
        done = trial.run(arguments)
        done.must("another process is training" in done.refused)
    os.kill(first.pid, signal.SIGCONT)
    newest = trial.newest()
    if trial.draw.random() < 0.5:
        first.kill()
    else:
        done = first.wait()
        done.must(done.code == 0)
    trial.resume(newest)
    return "refused"


def started_together(trial: Trial) -> str:
    trial.prepare()
    both = [trial.start(trial.training()) for _ in range(2)]
    done = sorted((process.wait() for process in both), key=lambda each: each.code)
    done[0].must(done[0].code == 0)
    done[1].must(bool(done[1].refused))
    trial.must_be(trial.reference.result)
    return "refused"


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


def kinds(operations: int) -> list[tuple[str, str, Callable[[Trial], str], int]]:
    """All kinds of faults: name, detail, function, how often; ``operations`` are those of a save."""
    cuts = [(at, (errno.EIO, errno.ENOSPC)[at % 2]) for at in range(operations)]
    return [
        ("SIGKILL at any moment", "", kill_at_any_moment, 24),
        ("SIGKILL in a save", "", kill_in_a_save, 24),
        *(
            ("torn save, SIGKILL", f"operation {at}", partial(torn_by, None, at), 1)
            for at, _ in cuts
        ),
        *(
            ("torn save, system error", f"operation {at}", partial(torn_by, n, at), 1)
            for at, n in cuts
        ),
        ("full disk (small tmpfs)", "", full_disk, 12),
        ("read-only folder (mount)", "", read_only, 6),
        ("disk fails for good (EIO, EROFS)", "EIO", partial(fails_from, errno.EIO), 6),
        ("disk fails for good (EIO, EROFS)", "EROFS", partial(fails_from, errno.EROFS), 6),
        *(("bit flipped", file, partial(damaged, file, "flip"), 4) for file in FILES),
        *(("tail cut", file, partial(damaged, file, "cut"), 2) for file in FILES),
        ("second trainer", "", second_trainer, 6),
        ("two started together", "", started_together, 6),
    ]


NEED_MOUNTS = ("full disk (small tmpfs)", "read-only folder (mount)")
