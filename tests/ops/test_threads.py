"""Shares of a loop in threads: none runs on, and what goes wrong in one is said."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from memspan.errors import MemspanError
from memspan.ops.native import threads
from memspan.ops.native.threads import in_shares


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_an_interrupt_waits_for_the_other_shares() -> None:
    ended = []

    def run(first: int, end: int) -> int:
        if not first:
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(first)
        return 1

    with pytest.raises(KeyboardInterrupt):
        in_shares(run, 3, 3)
    assert sorted(ended) == [1, 2]


def test_an_interrupt_while_waiting_waits_on() -> None:
    caller, ended = threading.get_ident(), []

    def run(first: int, end: int) -> int:
        if first:
            time.sleep(0.05)
            signal.pthread_kill(caller, signal.SIGINT)
            time.sleep(0.05)
            ended.append(first)
        return 1

    with pytest.raises(KeyboardInterrupt):
        in_shares(run, 2, 2)
    assert ended == [1]


def test_without_another_thread_the_caller_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    read, start = [], threading.Thread.start

    def start_first(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        start(thread)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def run(first: int, end: int) -> int:
        read.append((threading.current_thread() is threading.main_thread(), first, end))
        return 1

    monkeypatch.setattr(threading.Thread, "start", start_first)
    in_shares(run, 6, 6)
    assert sorted(read) == [(False, 2, 4), (True, 0, 2), (True, 4, 6)]


def test_what_a_thread_raises_is_raised() -> None:
    def run(first: int, end: int) -> int:
        if first:
            raise ValueError("in a thread")
        return 1

    with pytest.raises(ValueError, match="in a thread"):
        in_shares(run, 2, 2)
    with pytest.raises(MemspanError, match="memory is full"):
        in_shares(lambda first, end: int(not first), 2, 2)
