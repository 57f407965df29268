"""Cores that other programs use: how many threads a verb takes, and how they wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memspan import cores
from memspan.lab.commands import threads
from memspan.native import waiting

Clocks = tuple[float, float, float] | None


@pytest.mark.parametrize(
    ("quota", "found"), [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1), ("", 4)]
)
def test_a_container_has_as_many_cores_as_its_cpu_time_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, found: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    assert cores.cores() == found


def test_other_programs_use_what_is_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 seconds all programs used 18 CPU seconds, and this process 5."""
    clocks: list[Clocks] = [(100.0, 7.0, 50.0), (118.0, 12.0, 60.0), (118.0, 12.5, 61.0), None]
    monkeypatch.setattr(cores, "_clocks", lambda: clocks.pop(0))
    others = cores.OtherPrograms()
    assert others.cores() == 1.3
    # The system's clock is coarser than the process's.
    assert others.cores() == 0
    assert others.cores() == 0


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str | None]]:
    """The number of threads on a machine of four cores, and the line that says so."""
    for name in threads.DECIDED:
        monkeypatch.delenv(name, raising=False)
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "LOOK_SECONDS", 0)

    def choose(
        used: float, given: int | None = None, recorded: int | None = None, one: bool = False
    ) -> tuple[int, str | None]:
        now[0] = 4
        monkeypatch.setattr(threads.OtherPrograms, "cores", lambda _: used)
        line = threads.set_threads(given, recorded, one=one)
        return now[0], line

    return choose


def test_a_verb_takes_the_cores_that_are_free(
    choose: Callable[..., tuple[int, str | None]],
) -> None:
    decides = "(--threads N decides)"
    assert choose(0.2) == (4, f"4 threads {decides}")
    assert choose(2.1) == (2, f"2 threads, since other programs use 2.1 of 4 cores {decides}")
    assert choose(3.9)[0] == 1
    assert choose(0.0, one=True)[0] == 1


def test_a_resumed_run_keeps_its_threads(choose: Callable[..., tuple[int, str | None]]) -> None:
    """Its sums are rounded as before; a machine with fewer cores cannot."""
    assert choose(3.0, recorded=4) == (4, "4 threads, as in the run so far (--threads N decides)")
    assert choose(0.0, recorded=1)[0] == 1
    assert choose(0.0, recorded=8)[0] == 4


def test_the_user_decides(
    choose: Callable[..., tuple[int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(3.0, given=3, recorded=2) == (3, None)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose(3.0, recorded=2, one=True) == (4, None)
    assert choose(3.0, given=2) == (2, None)


def _os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


gnu_openmp = pytest.mark.skipif(waiting._gnu_openmp() is None, reason="there is no GNU OpenMP")


@gnu_openmp
def test_openmp_has_more_threads_than_cores_while_others_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [2.0]
    before = _os_threads()
    n_cores = os.cpu_count() or 1
    for name in waiting.DECIDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_cores)
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(waiting.OtherPrograms, "cores", lambda _: used[0])
    with waiting.sharing_cores():
        _until(lambda: _os_threads() > before + n_cores)
        used[0] = 0.0
        # The one that watches.
        _until(lambda: _os_threads() <= before + 1)
        used[0] = 2.0
        _until(lambda: _os_threads() > before + n_cores)
    _until(lambda: _os_threads() <= before)


@gnu_openmp
@pytest.mark.parametrize("variable", [None, *waiting.DECIDED])
def test_threads_wait_as_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """So does a single thread, which waits for none."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if variable is None else 2)
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    before = _os_threads()
    with waiting.sharing_cores():
        assert _os_threads() == before
