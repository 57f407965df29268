"""Run folders after a crash, with a second trainer or changed files: nothing goes unnoticed.

The campaign (``make chaos``) does the same to real processes; here is one fast test for each promise.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import memspan
from command_line import SMALL, refused
from memspan.errors import MemspanError
from memspan.files import disk
from memspan.lab import cli
from memspan.lab.runs import checkpoints, history
from memspan.lab.runs.checkpoint_files import read_state, write_state
from memspan.lab.runs.folder import lock_run
from memspan.lab.training import start, trainer
from memspan.lab.training.options import OptimConfig
from tiny_runs import OPTIONS, PowerCut, assert_same, content, cut_at, options, validations

pytestmark = [pytest.mark.hardening, pytest.mark.usefixtures("tiny_text")]


@contextmanager
def operations(before: Callable[[], None]) -> Iterator[None]:
    """Call ``before`` ahead of everything that is done to a file system to write."""

    def counted(original: Any, writes: Callable[..., object] = lambda *_, **__: True) -> Any:
        def operation(*arguments: Any, **options: Any) -> Any:
            if writes(*arguments, **options):
                before()
            return original(*arguments, **options)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "link", "unlink", "mkdir", "rmdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        writes = lambda path, mode="r", *_, **__: set(mode) & set("wax+")  # noqa: E731
        patch.setattr(builtins, "open", counted(open, writes))
        yield


def cut_in(place: Any, name: str, cut: int | None, work: Callable[[], object]) -> int:
    """Power goes before operation ``cut`` of a function, or after its last; how many were made."""
    original = getattr(place, name)
    done = 0

    def count() -> None:
        nonlocal done
        if done == cut:
            raise PowerCut
        done += 1

    def cut_short(first: Any, *others: Any) -> None:
        last_save = place is history or first._state.step == 6
        with operations(count) if last_save else nullcontext():
            original(first, *others)
        if last_save and cut is not None:
            raise PowerCut

    with pytest.MonkeyPatch.context() as patch, suppress(PowerCut):
        patch.setattr(place, name, cut_short)
        work()
    return done


CONSTANT = OptimConfig(warmup_steps=2, schedule="constant")
SHORT, LONG = (options(optim=CONSTANT, steps=steps) for steps in (6, 8))


@pytest.mark.parametrize(
    ("place", "name", "last"),
    [(trainer.Checkpointer, "save", SHORT), (history, "record", LONG)],
    ids=["a save", "a change of options"],
)
def test_a_crash_between_any_two_operations_is_recovered(place: Any, name: str, last: Any) -> None:
    def go_on(folder: Path) -> Path:
        return start.resume(folder, config=last)

    if place is history:
        start.train(SHORT, Path("before"))
    else:
        cut_in(place, name, 0, lambda: start.train(SHORT, Path("before")))
    whole = shutil.copytree("before", Path("whole"))
    total = cut_in(place, name, None, lambda: go_on(whole))
    assert total > 8
    for cut in range(total + 1):
        folder = shutil.copytree("before", Path(f"cut-{cut}"))
        assert cut_in(place, name, cut, lambda folder=folder: go_on(folder)) == cut
        step = memspan.load(folder).config.train.steps
        if checkpoints.latest(folder).state["step"] < step:
            start.resume(folder)
        else:
            with pytest.raises(MemspanError, match="is finished"):
                start.resume(folder)
        if step < last.train.steps:
            go_on(folder)
        assert content(folder) == content(whole), cut
        assert not list(folder.rglob(".*")), cut
    start.train(last, Path("straight"))
    assert_same(whole, "straight")


def test_a_second_trainer_is_refused() -> None:
    """Until the first has ended. Of other processes ``test_distributed.py`` asks, and of one that was
    killed ``test_train.py``."""
    start.train(OPTIONS, Path("r"))
    before = content(Path("r"))
    with lock_run(Path("r")):
        # Locked only where folders cannot be; whoever cleans up may remove it.
        Path("r/.lock").unlink(missing_ok=True)
        for begin in (start.resume, lambda folder: start.train(OPTIONS, folder)):
            with pytest.raises(MemspanError, match="another process is training in r"):
                begin(Path("r"))
    assert content(Path("r")) == before
    with pytest.raises(MemspanError, match="is finished"):
        start.resume(Path("r"))


def test_a_file_is_locked_where_folders_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NFS."""
    flock = disk.fcntl.flock

    def only_files(handle: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(disk.fcntl, "flock", only_files)
    for _ in range(2):
        with (
            disk.only_writer(Path("r")),
            pytest.raises(MemspanError, match="another process"),
            disk.only_writer(Path("r")),
        ):
            pass


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json"])
def test_options_and_tokenizer_are_bound_to_the_weights(name: str) -> None:
    start.train(OPTIONS, Path("r"))
    path = Path("r", name)
    # White space means nothing to either file.
    path.write_bytes(path.read_bytes() + b"\n")
    for use in (memspan.load, memspan.resume):
        with pytest.raises(MemspanError, match=f"{name} in r has changed") as refusal:
            use("r")
        assert "away" not in str(refusal.value)


def test_the_best_weights_are_published_wherever_they_are_validated() -> None:
    """Validations may fall on steps where no checkpoint is due."""
    slow = OptimConfig(warmup_steps=50)
    start.train(options(optim=slow, evaluate_every=3, save_every=4, steps=7), Path("r"))
    scores = dict(validations("r"))
    assert set(scores) == {3, 6, 7}
    assert memspan.load("r").step == min(scores, key=scores.__getitem__)


def test_a_run_that_never_saved_is_begun_anew() -> None:
    with cut_at(0):
        start.train(OPTIONS, Path("r"))
    for use in (memspan.load, memspan.resume):
        again = r"no checkpoint yet.*start it again with .*train --preset r/config\.toml --out r$"
        with pytest.raises(MemspanError, match=again):
            use("r")
    cli.main(["train", "--preset", "r/config.toml", "--out", "r"])
    start.train(OPTIONS, Path("whole"))
    assert content(Path("r")) == content(Path("whole"))


def test_published_weights_come_back_from_their_checkpoint() -> None:
    start.train(OPTIONS, Path("r"))
    published = Path("r/model.safetensors")
    good = published.read_bytes()
    published.unlink()
    with pytest.raises(MemspanError, match=r"is missing: restore it, or .*memspan export r$"):
        memspan.load("r")
    full = mock.patch.object(checkpoints, "link_atomically", side_effect=OSError(28, "it is full"))
    with full, pytest.raises(MemspanError, match=r"cannot save a checkpoint in r \(it is full\)"):
        checkpoints.export(Path("r"), keep=1)
    cli.main(["export", "r"])
    assert published.read_bytes() == good
    published.unlink()
    published.write_bytes(good[:-1])
    with pytest.raises(MemspanError, match="is finished"):
        start.resume(Path("r"))
    assert published.read_bytes() == good


def test_a_folder_where_nothing_may_be_written() -> None:
    start.train(OPTIONS, Path("r"))
    with (
        mock.patch.object(os, "open", side_effect=OSError(30, "Read-only file system")),
        pytest.raises(MemspanError, match="cannot write r "),
    ):
        start.resume(Path("r"))
    # Old checkpoints would be deleted there: a run from elsewhere must not say where.
    Path("r/checkpoints").rename("elsewhere")
    Path("r/checkpoints").symlink_to(Path("elsewhere").absolute())
    with pytest.raises(MemspanError, match="is a link out of the run's folder"):
        start.resume(Path("r"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": "6"}, "its step is str"),
        ({"corpus": None}, "its corpus is NoneType"),
        ({"corpus": {"train": "0"}}, "its corpus has no splits"),
        ({"streams": {}}, "not a stream position"),
        ({"health": {"skipped_updates": "many"}}, "its health is"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change: Any, says: str) -> None:
    """Its checksum being right."""
    with cut_at(5):
        start.train(options(save_every=1), Path("r"))
    newest = Path("r/checkpoints/step-00000005")
    state = read_state(newest)
    write_state(newest, state | change, state["files"])
    with pytest.raises(MemspanError, match=says):
        start.resume(Path("r"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "x"), "No space left on device (x): free some"),
        (MemoryError(), "not enough memory for these sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "not enough memory"),
    ],
    ids=["disk", "memory", "tensors"],
)
def test_refusals_of_the_system_are_one_line(error: Exception, says: str, capsys: Any) -> None:
    with mock.patch.object(cli, "_dispatch", side_effect=error):
        assert says in refused(capsys, "evaluate", "r")


def test_brackets_in_the_name_of_a_corpus_are_no_mark_up() -> None:
    Path("[").mkdir()
    Path("text.txt").rename("[/b].txt")
    cli.main(["train", *SMALL, "--data.corpus", "[/b].txt", "--out", "r"])
    assert memspan.load("r").config.data.corpus == os.path.abspath("[/b].txt")
