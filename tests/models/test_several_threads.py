"""One reader, file or stream of random numbers, and several threads: right, or refused in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memspan
from architectures import CASES
from memspan import MemspanError
from memspan.files.disk import write_atomically
from memspan.lab.exclusive import random_numbers
from memspan.models import LanguageModel


def elsewhere(function: Callable[[], Any]) -> BaseException | None:
    """The error that ``function`` raises in another thread."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return raised[0]


@pytest.mark.parametrize("name", CASES)
def test_a_reader_that_another_thread_uses_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a call of one thread every call of another is refused, and changes nothing."""
    model = LanguageModel(11, CASES[name].backbone).eval()
    reader = model.reader(batch_size=2)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    used = model.reader(batch_size=2)._backbone
    other = model.initial_memory(1)
    calls: list[Callable[[], Any]] = [
        lambda: reader.read(tokens),
        lambda: reader.reset([True, False]),
        lambda: reader.replace([1], other),
    ]
    if isinstance(getattr(type(used), "memory", None), property):
        calls += [lambda: reader.memory, lambda: reader.select([0])]
    expected = model.reader(batch_size=2).read(tokens)
    found: list[BaseException | None] = []
    read = reader._backbone._read_vectors

    def meanwhile(*given: Any) -> Any:
        found.extend(map(elsewhere, calls))
        return read(*given)

    monkeypatch.setattr(reader._backbone, "_read_vectors", meanwhile)
    assert torch.equal(reader.read(tokens), expected)
    assert len(found) == len(calls)
    for error in found:
        assert isinstance(error, MemspanError)
        assert "another thread is using this reader" in str(error)
    assert elsewhere(lambda: reader.reset([True, True])) is None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("own_forward", [False, True])
def test_a_pass_replaces_no_weights_that_another_thread_may_read(
    name: str, own_forward: bool
) -> None:
    """Another thread would leave out their gradients, or find its reader stale."""
    model = LanguageModel(11, CASES[name].backbone)
    if own_forward:
        for module in model.modules():
            module.forward = module.forward
    weights = dict(model.named_parameters())
    replaced: set[str] = set()

    def compare(*_: object) -> None:
        replaced.update(n for n, p in model.named_parameters() if p is not weights[n])

    for module in model.modules():
        module.register_forward_hook(compare)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    memory = None
    for _ in range(4):
        output = model(tokens, memory, targets=tokens)
        output.loss.backward()
        memory = output.memory.detach()
    assert not replaced


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.backbone])
def test_data_parallel_is_refused(part: Callable[[LanguageModel], nn.Module]) -> None:
    """Its copies are made in one process, a thread for each GPU."""
    model = part(LanguageModel(11, CASES["lstm"].backbone))
    with pytest.raises(MemspanError, match="DistributedDataParallel"):
        # As torch's function does, for each module of a model.
        [module._replicate_for_data_parallel() for module in nn.Sequential(model).modules()]


def test_threads_that_write_one_file_leave_one_of_their_contents(tmp_path: Path) -> None:
    """Each in pieces, between which the other writes."""
    file = tmp_path / "file"
    turn = threading.Barrier(2, timeout=60)

    def pieces(letter: bytes) -> Any:
        for _ in range(3):
            turn.wait()
            yield letter * 1000

    def write(letter: bytes) -> None:
        write_atomically(file, pieces(letter))

    other = threading.Thread(target=write, args=(b"a",))
    other.start()
    write(b"b")
    other.join()
    assert file.read_bytes() in (b"a" * 3000, b"b" * 3000)
    assert list(tmp_path.iterdir()) == [file]


def test_trainings_and_checks_of_two_threads_do_not_share_random_numbers(tmp_path: Path) -> None:
    config = memspan.load("shakespeare").config
    calls: list[Callable[[], Any]] = [
        lambda: memspan.train(config, tmp_path / "run"),
        lambda: memspan.resume("shakespeare"),
        lambda: memspan.estimate(config),
        lambda: memspan.check(torch.nn.GRU(2, 2)),
    ]
    with random_numbers():
        for call in calls:
            error = elsewhere(call)
            assert isinstance(error, MemspanError)
            assert "another thread of this process trains or checks a model" in str(error)
        # The thread itself may.
        with random_numbers():
            pass

    def alone() -> None:
        with random_numbers():
            pass

    assert elsewhere(alone) is None
    assert not (tmp_path / "run").exists()
