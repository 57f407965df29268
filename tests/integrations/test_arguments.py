"""Arguments that transformers' models take beside tokens, mask and labels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_model import every_architecture, every_case, text, wrapped
from test_standard_scripts import small
from transformers import AutoModelForCausalLM

from architectures import VOCABULARY
from memspan.errors import MemspanError
from memspan.lab.integrations.transformers import MemspanCache, MemspanConfig
from memspan.lab.integrations.transformers.model import MemspanModel

close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


@every_case
def test_vectors_are_read_like_their_tokens(case: Any) -> None:
    model = wrapped(case)
    ids = text(2, 9)
    cache = MemspanCache()
    of_vectors = MemspanCache()
    expected = model(ids, cache=cache).logits
    vectors = model.get_input_embeddings()(ids)
    close(model(inputs_embeds=vectors, cache=of_vectors).logits, expected)
    close(model(ids, cache=of_vectors).logits, model(ids, cache=cache).logits)


@every_architecture
def test_generation_starts_from_vectors(case: Any) -> None:
    model = wrapped(case)
    ids = text(2, 5)
    vectors = model.get_input_embeddings()(ids)
    written = model.generate(inputs_embeds=vectors, max_new_tokens=6, do_sample=False)
    assert written.equal(model.generate(ids, max_new_tokens=6, do_sample=False)[:, 5:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_vectors_are_skipped(side: str) -> None:
    model = small().eval()
    ids = text(1, 4)
    padding = torch.full((1, 3), torch.nan)
    mask = torch.ones(1, 4)
    vectors = model.get_input_embeddings()(ids)
    parts = [vectors, padding[..., None].expand(-1, -1, 8)]
    masks = [mask, torch.zeros(1, 3)]
    own = slice(0, 4)
    if side == "left":
        parts.reverse()
        masks.reverse()
        own = slice(3, 7)
    padded = model(inputs_embeds=torch.cat(parts, 1), attention_mask=torch.cat(masks, 1))
    torch.testing.assert_close(padded.logits[:, own], model(ids).logits)


@every_architecture
def test_hidden_states_are_the_input_of_the_first_layer_and_of_the_head(case: Any) -> None:
    model = wrapped(case)
    ids = text(2, 9)
    output = model(ids, output_hidden_states=True, logits_to_keep=2)
    first, *between, last = output.hidden_states
    close(first, model.model.embedding(ids))
    assert between == [None] * (len(model.model.backbone.layers) - 1)
    close(model.model.head(last[:, -2:]), output.logits)
    close(model(ids).logits[:, -2:], output.logits)
    close(MemspanModel.forward(model, ids, output_hidden_states=True).hidden_states[-1], last)


def test_generation_returns_hidden_states() -> None:
    model = small().eval()
    ids = text(1, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, output_hidden_states=True, **options)
    assert [states[-1].shape[1] for states in output.hidden_states] == [4, 1, 1]
    assert output.sequences.equal(model.generate(ids, **options).sequences)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(5), torch.arange(7, 12)[None], torch.tensor([[0] * 3 + [0, 1], [0, 1, 2, 3, 4]])],
    ids=["first", "later", "padded"],
)
def test_positions_one_after_another_are_what_is_read(positions: Any) -> None:
    model = small().eval()
    ids = text(2, 5)
    mask = torch.tensor([[0, 0, 0, 1, 1], [1] * 5]) if len(positions) == 2 else torch.ones(2, 5)
    given = model(ids, mask, position_ids=positions)
    assert given.logits.equal(model(ids, mask).logits)


def test_packed_documents_are_refused() -> None:
    mask = torch.tensor([[1, 0, 1]])
    with pytest.raises(MemspanError, match="each document a row of its own"):
        small()(text(1, 3), mask, position_ids=torch.arange(3))


def test_untied_weights_are_refused_for_a_tied_model(tmp_path: Any) -> None:
    small().save_pretrained(tmp_path)
    with pytest.raises(MemspanError, match="head of this model shares its weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    untied = MemspanConfig(
        embedding={"tie": False}, vocab_size=VOCABULARY, tie_word_embeddings=False
    )
    assert MemspanConfig.from_dict(untied.to_dict()).tie_word_embeddings is False


@every_architecture
def test_other_libraries_find_sizes_and_the_token_embedding(case: Any) -> None:
    model = wrapped(case)
    sizes = model.config.to_dict()
    assert sizes["hidden_size"] == case.backbone.d_model
    assert sizes["num_hidden_layers"] == case.backbone.n_layers
    assert sizes["num_attention_heads"] == getattr(case.backbone, "n_heads", 1)
    assert model.get_submodule("embeddings.word_embeddings") is model.model.embedding
