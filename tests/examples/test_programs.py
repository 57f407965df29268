"""Small programs: what they are said to print is what running them prints."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from programs import VARIABLES, WORDS, Programs, execute

STATEMENT = r"(?:(\w) = (\d+)|(\w) (?:\+\+|--)|print (\w) (\d+)|if (\w) [<>] (\d+) : .+)"


@given(n=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_programs_print_what_they_compute(n: int, seed: int) -> None:
    words = Programs(n).program(200, np.random.default_rng(seed))
    said = [int(words[i + 2]) for i, word in enumerate(words) if word == "print"]
    assert execute(words) == said
    assert len(words) >= 200
    for statement in " ".join(words).removesuffix(" ;").split(" ; "):
        assert re.fullmatch(STATEMENT, statement), statement
    assert set(words) & set(VARIABLES) == set(VARIABLES[:n])


def test_batches_are_rows_of_programs() -> None:
    task = Programs(2)
    tokens, printed = task.batch(4, 150, np.random.default_rng(1))
    random = np.random.default_rng(1)
    for row, mask in zip(tokens, printed, strict=True):
        words = task.program(150, random)[:150]
        assert [WORDS[i] for i in row] == words
        assert mask.tolist() == [i >= 2 and words[i - 2] == "print" for i in range(150)]
    assert len(tokens) == 4
    assert task.vocab_size == len(set(WORDS))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="shares"):
        Programs(prints=-0.1, conditions=0.5)
    with pytest.raises(ValueError, match="1 to 5"):
        Programs(6)
