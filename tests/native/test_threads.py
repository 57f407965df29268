"""Shares of a loop in threads: none runs on, and what goes wrong in one is said."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from memspan.errors import MemspanError
from memspan.native import library, threads
from memspan.native.threads import in_shares

POINTER = ctypes.c_char_p
SHARE = ctypes.c_int64
ALONE = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, SHARE, SHARE)
WITH_WEIGHTS = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, SHARE, SHARE)


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.shares() is None or threads.parallel() is None:
        pytest.skip("no loops in C, or PyTorch has no GNU OpenMP")
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize(
    ("least", "shares"), [(1, [(0, 2), (2, 5), (5, 8)]), (3, [(0, 4), (4, 8)])]
)
def test_shares_run_at_once(least: int, shares: list[tuple[int, int]]) -> None:
    """Each has the least number of items."""
    read = []
    all_here = threading.Barrier(len(shares), timeout=60)

    @WITH_WEIGHTS
    def run(given: bytes, weights: bytes, first: int, end: int) -> int:
        all_here.wait()
        read.append((first, end))
        return int((given, weights) == (b"given", b"weights"))

    in_shares(run, (b"given", b"weights"), 8, 8, least)
    assert sorted(read) == shares


def test_an_interrupt_while_waiting_waits_on() -> None:
    caller = threading.get_ident()
    ended = []
    both_here = threading.Barrier(2, timeout=60)

    @ALONE
    def run(given: bytes, first: int, end: int) -> int:
        both_here.wait()
        if threading.get_ident() != caller:
            time.sleep(0.05)
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.05)
            ended.append(True)
        return 1

    with pytest.raises(KeyboardInterrupt):
        in_shares(run, (b"",), 2, 2)
    assert ended == [True]


def _recorded(read: list[object]) -> Callable[..., int]:
    @ALONE
    def run(given: bytes, first: int, end: int) -> int:
        is_main = threading.current_thread() is threading.main_thread()
        read.append((is_main, first, end))
        return 1

    return run


def test_without_openmp_the_caller_takes_all_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "parallel", lambda: None)
    read: list[object] = []
    in_shares(_recorded(read), (b"",), 6, 6)
    assert read == [(True, 0, 2), (True, 2, 4), (True, 4, 6)]


def test_without_the_library_the_caller_takes_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "shares", lambda: None)
    read: list[object] = []
    in_shares(_recorded(read), (b"",), 6, 6)
    assert read == [(True, 0, 6)]


def test_fewer_threads_than_shares_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    @ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p)
    def one_thread(body: Callable[[int], None], data: int) -> None:
        body(data)

    monkeypatch.setattr(threads, "parallel", lambda: one_thread)
    read: list[object] = []
    in_shares(_recorded(read), (b"",), 6, 6)
    assert read == [(True, 0, 2), (True, 2, 4), (True, 4, 6)]


def test_a_share_out_of_memory() -> None:
    @ALONE
    def run(given: bytes, first: int, end: int) -> int:
        return int(not first)

    with pytest.raises(MemspanError, match="memory is full"):
        in_shares(run, (b"",), 2, 2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_without_its_parents_threads() -> None:
    usleep = ctypes.CDLL(None).usleep
    with pytest.raises(MemspanError):
        in_shares(usleep, (None,), 3, 3)
    child = os.fork()
    if not child:
        signal.alarm(30)
        with contextlib.suppress(MemspanError):
            in_shares(usleep, (None,), 3, 3)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
