"""Shares of a loop in threads: none runs on, and what goes wrong in one is said."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from ctypes import c_long

import pytest
import torch

from memspan.errors import MemspanError
from memspan.native import threads
from memspan.native.threads import in_shares


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if threads._parallel()[1] is None:
        pytest.skip("PyTorch has no GNU OpenMP")
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize(
    ("least", "shares"), [(1, [(0, 2), (2, 5), (5, 8)]), (3, [(0, 4), (4, 8)])]
)
def test_shares_run_at_once(least: int, shares: list[tuple[int, int]]) -> None:
    """Each has the least number of items."""
    read = []
    all_here = threading.Barrier(len(shares), timeout=60)

    def run(given: str, first: c_long, end: c_long) -> int:
        all_here.wait()
        read.append((first.value, end.value))
        return int(given == "given")

    in_shares(run, ("given",), 8, 8, least)
    assert sorted(read) == shares


def test_an_interrupt_while_waiting_waits_on() -> None:
    caller = threading.get_ident()
    ended = []
    both_here = threading.Barrier(2, timeout=60)

    def run(first: c_long, end: c_long) -> int:
        both_here.wait()
        if threading.get_ident() != caller:
            time.sleep(0.05)
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.05)
            ended.append(True)
        return 1

    with pytest.raises(KeyboardInterrupt):
        in_shares(run, (), 2, 2)
    assert ended == [True]


@pytest.mark.parametrize("n_threads", [0, 1])
def test_without_other_threads_the_caller_takes_all_shares(
    monkeypatch: pytest.MonkeyPatch, n_threads: int
) -> None:
    """No OpenMP, or fewer threads than were asked for."""
    parallel = [None, lambda body, calls, *_: body(calls)][n_threads]
    monkeypatch.setattr(threads, "_parallel", lambda: (os.getpid(), parallel))
    read = []

    def run(first: c_long, end: c_long) -> int:
        is_main = threading.current_thread() is threading.main_thread()
        read.append((is_main, first.value, end.value))
        return 1

    in_shares(run, (), 6, 6)
    assert read == [(True, 0, 2), (True, 2, 4), (True, 4, 6)]


def test_a_share_out_of_memory() -> None:
    with pytest.raises(MemspanError, match="memory is full"):
        in_shares(lambda first, end: int(not first.value), (), 2, 2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_without_its_parents_threads() -> None:
    usleep = ctypes.CDLL(None).usleep
    with pytest.raises(MemspanError):
        in_shares(usleep, (), 3, 3)
    child = os.fork()
    if not child:
        signal.alarm(30)
        with contextlib.suppress(MemspanError):
            in_shares(usleep, (), 3, 3)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
