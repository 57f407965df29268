"""Many streams through few rows: what a server does with a reader."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from architectures import CASES, Case
from golden import assert_same
from memspan.memory import Memory
from memspan.models import FastWeights, LanguageModel
from readings import assert_memories_equal, joined

ROWS, TURNS = 16, 3
CUTS = [5, 1]
"""What a stream reads in one turn; where it is cut matters to some architectures."""
EVERY = {
    "transformer-xl": "xl-segment",
    "compressive": "compressive",
    "feedback": "feedback",
    "fast-weights": "fast-delta",
    "lstm": "lstm",
    "transformer": "transformer",
}


def books(count: int) -> Tensor:
    """Texts from as many places of the standard library's sources, ``[count, TURNS * 6]``."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = b"".join(file.read_bytes()[:20_000] for file in files)
    length = TURNS * sum(CUTS)
    texts = [text[n * len(text) // count :][:length] for n in range(count)]
    assert len(set(texts)) > 0.9 * count
    return torch.tensor([list(text) for text in texts])


def bytes_model(case: Case) -> LanguageModel:
    model = case.model()
    sized = LanguageModel(256, replace(case.backbone)).double().eval()
    sized.backbone = model.backbone
    return sized


def served(model: LanguageModel, texts: Tensor, folder: Path) -> tuple[Tensor, list[Memory]]:
    """All texts read in turns of random order, 16 at once: logits ``[N, T, V]`` and last memories.

    The memory of every fifth waits in a file.
    """
    fingerprint, path = model.fingerprint(), folder / "memory.pt"
    chance, turn = random.Random(0), sum(CUTS)
    n_streams, reader = len(texts), model.reader(batch_size=ROWS)
    logits = texts.new_zeros(n_streams, texts.shape[1], 256, dtype=torch.float64)
    saved: list[Memory | None] = [None] * n_streams
    done = [0] * n_streams
    waiting, rows = list(range(n_streams)), [-1] * ROWS
    while True:
        leaving = [
            row
            for row, stream in enumerate(rows)
            if stream < 0 or done[stream] == TURNS or chance.random() < 0.5
        ]
        kept, coming = reader.select(leaving), []
        for place, row in enumerate(leaving):
            if (stream := rows[row]) >= 0:
                memory = kept.select([place])
                if stream % 5 == 0:
                    memory.save(path, fingerprint)
                    memory = model.load_memory(path)
                saved[stream] = memory
                if done[stream] < TURNS:
                    waiting.append(stream)
        for row in leaving:
            rows[row] = waiting.pop(chance.randrange(len(waiting))) if waiting else -1
            if rows[row] >= 0 and saved[rows[row]] is not None:
                coming.append(row)
        # Those that have read nothing begin anew, the others go on.
        reader.reset([row in leaving and row not in coming for row in range(ROWS)])
        if coming:
            reader.replace(coming, joined([saved[rows[row]] for row in coming]))
        active = [row for row in range(ROWS) if rows[row] >= 0]
        if not active:
            return logits, [memory for memory in saved if memory is not None]
        streams = torch.tensor([rows[row] for row in active], dtype=torch.long)
        start = torch.tensor([done[stream] * turn for stream in streams.tolist()])
        for length in CUTS:
            tokens = texts.new_zeros(ROWS, length)
            columns = start[:, None] + torch.arange(length)
            tokens[active] = texts[streams[:, None], columns]
            logits[streams[:, None], columns] = reader.read(tokens)[active]
            start = start + length
        for stream in streams.tolist():
            done[stream] += 1


@pytest.mark.parametrize("name", EVERY)
def test_streams_in_turn_equal_each_alone(name: str, tmp_path: Path) -> None:
    """Texts that go on from their saved memories, among others, as if each were read alone."""
    thorough = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
    # A thousand streams of every architecture take ten seconds.
    count = 1000 if thorough or name == "compressive" else 100
    model, texts = bytes_model(CASES[EVERY[name]]), books(count)
    with torch.no_grad():
        logits, memories = served(model, texts, tmp_path)
    assert len(memories) == count
    reader = model.reader(batch_size=count)
    expected = torch.cat([reader.read(part) for part in texts.split(CUTS * TURNS, 1)], 1)
    assert_same(logits, expected, 1e-9, "logits")
    assert_memories_equal(joined(memories), reader.memory, 1e-9)
    # Rows that are read at once are no proof that each is alone.
    for stream in range(0, count, count // 5):
        alone = model.reader()
        own = [alone.read(part) for part in texts[[stream]].split(CUTS * TURNS, 1)]
        assert_same(torch.cat(own, 1), logits[[stream]], 1e-9, "logits alone")
        assert_memories_equal(memories[stream], alone.memory, 1e-9)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values on device ``meta`` do not exist, so whatever waited for one would fail."""
    # It is no device of torch.autocast.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    model = bytes_model(CASES[EVERY[name]])
    memory = model.initial_memory(4)
    given, counts = memory.select([3, 0]), memory.counts()
    model.to("meta")
    with monkeypatch.context() as patch:
        # Once, when it is made, a reader may wait.
        patch.setattr(type(memory), "counts", lambda _: counts)
        patch.setattr(FastWeights, "check_feature_map", lambda *_: None)
        reader = model.reader(memory.to("meta"))

    def read(length: int) -> None:
        logits = reader.read(torch.zeros(4, length, dtype=torch.int64, device="meta"))
        with pytest.raises(RuntimeError, match="meta"):
            logits.sum().item()

    read(7)
    reader.reset([True, False, False, True])
    read(1)
    reader.replace([2, 0], given)
    for length in (3, 1, 1, 1, 1, 1):
        read(length)
    assert reader.select([1, 2]).tokens_seen.is_meta
    assert reader.memory.batch_size == 4
