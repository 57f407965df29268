"""A whole text is scored as it is, without the cuts between its splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import memspan
from command_line import SMALL
from memspan.lab import cli
from memspan.lab.data.corpora import ALL, load_corpus
from memspan.lab.data.prepared import prepare
from memspan.lab.runs.texts import text_of

TEXT = "".join(f"number {n} follows number{n - 1}. " for n in range(400))


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "subwords"])
def test_tokens_are_those_of_the_text(kind: str, own_folders: Path) -> None:
    Path("t.txt").write_text(TEXT)
    prepared = prepare("t.txt", kind, 300 if kind == "subwords" else None)
    whole = prepare("t.txt", kind, with_tokenizer=prepared.tokenizer, whole=True)
    assert (whole.splits[ALL].tokens == prepared.tokenizer.encode(TEXT.encode())).all()
    parts = sum(len(split.tokens) for split in prepared.splits.values())
    assert (parts > len(whole.splits[ALL].tokens)) == (kind in ("words", "subwords"))


def test_files_are_in_the_order_of_their_names(own_folders: Path) -> None:
    """Among twenty or more, each belongs to one split."""
    Path("t").mkdir()
    for n in range(40):
        Path(f"t/{n:02}.txt").write_text(f"{n:02} ")
    (documents,) = load_corpus("t", whole=True).splits.values()
    assert [text.read() for text in documents] == [f"{n:02} ".encode() for n in range(40)]


def test_own_splits_are_put_together(own_folders: Path) -> None:
    for name in ("a", "b"):
        Path(name).write_text(f"{name} " * 50)
    (documents,) = load_corpus({"train": "a", "test": "b"}, whole=True).splits.values()
    assert [text.read() for text in documents] == [b"a " * 50, b"b " * 50]
    (documents,) = load_corpus("two-plays", whole=True).splits.values()
    assert [len(text) for text in documents] == [111_540]


def test_a_run_knows_the_whole_text_that_it_was_trained_on(own_folders: Path) -> None:
    Path("t.txt").write_text(TEXT)
    Path("u.txt").write_text(TEXT.upper())
    cli.main(["train", "--data.corpus", "t.txt", "--data.tokenizer", "words", "--out", "r", *SMALL])
    run = memspan.load("r")
    found = text_of(run, None, None, ALL, False)
    assert np.array_equal(found.tokens, run.tokenizer.encode(TEXT.encode()))
    assert found.as_in_training
    assert text_of(run, "u.txt", None, ALL, False).as_in_training is False
