"""A text, a run that was trained on it, and a file of models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import SMALL, TEXT
from memspan.lab import cli
from memspan.lab.training import metrics

MODELS = """
import torch
from torch import nn

from statelaws import Claims, Function, Inputs

gru = nn.GRU(4, 8)
both_ways = nn.GRU(4, 8, bidirectional=True)
linear = nn.Linear(4, 4)


class Forgets(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, state if len(x) == 1 else None)


def forgets():
    return Forgets(4, 8)


class Ignores(nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, None)


def ignores():
    return Ignores(4, 8)


def leaves():
    raise SystemExit(0)


def exits(x, state):
    raise SystemExit(0)


stopping = Function(exits, lambda rows: torch.zeros(rows, 8), Inputs(width=4))


def nowhere():
    return nn.GRU(4, 8, device="meta")


def claiming():
    return Function(exits, lambda rows: None, Inputs(width=4), claims=Claims(lengths={"window": 0}))


class Hidden(nn.Module):
    config = type("", (), {"vocab_size": 3})

    def forward(self, input_ids):
        return {"last_hidden_state": torch.zeros(*input_ids.shape, 2)}


def stops():
    raise OSError("no weights")


class Reads(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, size)

    def hidden(self, tokens, state):
        return self.rnn(self.embedding(tokens), state)

    def forward(self, tokens, state):
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state


def made(size=256, name="forward"):
    module = Reads(size)
    read, first = getattr(module, name), lambda rows: torch.zeros(1, rows, 8)
    return Function(read, first, Inputs(size), module=module)


def few():
    return made(size=64)


def headless():
    return made(name="hidden")
"""


@pytest.fixture
def text_file(own_folders: Path) -> None:
    Path("text.txt").write_bytes(TEXT)


@pytest.fixture
def models(own_folders: Path) -> None:
    """Models that are no runs, in ``models.py``; some are none at all."""
    Path("models.py").write_text(MODELS)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is trained once, for all tests to copy."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        Path("text.txt").write_bytes(TEXT)
        cli.main(["train", "--data.corpus", "text.txt", "--out", "run", *SMALL])
    return folder / "run"


@pytest.fixture
def run(text_file: None, trained: Path) -> Path:
    shutil.copytree(trained, "run")
    return Path("run")
