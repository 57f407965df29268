"""Small models of transformers' architectures, and how their caches are read."""

from __future__ import annotations

import pytest
import torch

from memspan.stateful.protocol import NotOfferedError
from memspan.stateful.recipes import RECIPES, build


@pytest.mark.parametrize("model_type", RECIPES)
def test_every_recipe_is_built_and_remembers(model_type: str) -> None:
    model = build(model_type)
    tokens = model.inputs.draw(1, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        fresh, _ = model.read(tokens[:, 3:], model.start(1))
        _, state = model.read(tokens[:, :3], model.start(1))
        later, _ = model.read(tokens[:, 3:], state)
    assert later.shape == (1, 3, 64)
    assert (later - fresh).abs().max() > 0.1 * later.std()


def test_a_script_makes_the_same_model() -> None:
    made = build("mistral", 3)
    names: dict[str, object] = {"torch": torch}
    exec(made.source(), names)
    tokens = made.inputs.draw(2, 9, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, state = made.read(tokens, made.start(2))
        seen, own = names["read"](tokens, names["start"](2))  # type: ignore[operator]
        assert torch.equal(seen, expected)
        lengths = torch.tensor([9, 4])
        expected, _ = made.read_padded(tokens, state, lengths, "right")
        seen, _ = names["read_padded"](tokens, own, lengths, "right")  # type: ignore[operator]
    assert torch.equal(seen[0], expected[0])
    assert torch.equal(seen[1, :4], expected[1, :4])


def test_rolling_back_is_the_caches_own() -> None:
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        llama = build("llama")
        _, state = llama.read(tokens, llama.start(1))
        back = llama.truncate(state, 8)
        _, short = llama.read(tokens[:, :4], llama.start(1))
        expected, _ = llama.read(tokens, short)
        torch.testing.assert_close(llama.read(tokens, back)[0], expected)
        xlstm = build("xlstm")
        _, state = xlstm.read(tokens, xlstm.start(1))
        with pytest.raises(NotOfferedError, match="no crop"):
            xlstm.truncate(state, 1)


@pytest.mark.parametrize(
    ("model_type", "bounded"),
    [("llama", False), ("mistral", True), ("gemma2", False), ("mamba", True), ("rwkv", True)],
)
def test_it_says_whether_a_cache_grows(model_type: str, bounded: bool) -> None:
    assert build(model_type).claims.bounded == bounded
