"""The pictures of docs/path.md: what the running models say, and what the page says of them."""

from __future__ import annotations

import pytest

import twelve_tokens
from twelve_tokens import FOLDER, PICTURES, left, slots_of


@pytest.mark.parametrize("name", PICTURES)
def test_they_are_what_the_models_say(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name](), "make figures"


def test_no_other_picture_lies_there() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*PICTURES}


def test_what_each_slot_holds() -> None:
    segments = ["abcd", "efgh", "ijkl"]
    assert slots_of("transformer-xl", "hidden", 0)[1:] == [[*tokens] for tokens in segments]
    assert slots_of("transformer-xl", "hidden", 1)[2] == ["abcde", "abcdef", "abcdefg", "abcdefgh"]
    assert slots_of("compressive", "hidden", 0)[1:] == [[*tokens] for tokens in segments]
    assert slots_of("compressive", "compressed", 0)[1:] == [["", ""], ["ab", "cd"], ["ef", "gh"]]
    assert slots_of("feedback", "vectors")[3][-1] == twelve_tokens.TOKENS


def test_what_is_left_in_a_matrix() -> None:
    assert left("sum") == [[100] * n for n in (4, 8, 12)]
    delta, gated = left("delta")[-1], left("gated-delta")[-1]
    assert delta[-1] == gated[-1] == 100
    assert min(delta) == 20
    assert gated[:4] == [0] * 4
    assert gated == sorted(gated)
