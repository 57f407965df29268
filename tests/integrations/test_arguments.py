"""Arguments that transformers' models take beside tokens, mask and labels."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from test_model import ONE_EACH, every_architecture, every_case, text, wrapped
from test_standard_scripts import small
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
)

from memspan.errors import MemspanError
from memspan.lab.converters.convert import convert
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.integrations.transformers import MemspanCache, fast_tokenizer
from memspan.lab.integrations.transformers.model import (
    MemspanForSequenceClassification,
    MemspanModel,
)
from memspan.lab.runs.run import load

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


LENGTHS = [4, 1, 7]
BOUNDS = {
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    "cu_seq_lens_q": torch.tensor([0, 4, 5, 12], dtype=torch.int32),
    "seq_idx": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None],
}


@every_architecture
def test_packed_documents_are_read_as_if_alone(case: Any) -> None:
    model = wrapped(case)
    documents = [text(1, n, seed=n) for n in LENGTHS]
    expected = torch.cat([model(each).logits for each in documents], 1)
    packed = torch.cat(documents, 1)
    for name, given in BOUNDS.items():
        close(model(packed, **{name: given}).logits, expected)
    close(model(packed, **BOUNDS, max_length_q=7).logits, expected)
    vectors = model.get_input_embeddings()(packed)
    close(model(inputs_embeds=vectors, **BOUNDS).logits, expected)


@pytest.mark.parametrize("architecture", ["gated-delta-net", "lstm"])
def test_packed_documents_go_on_in_the_next_segment(architecture: str) -> None:
    model = wrapped(ONE_EACH[architecture])
    documents = [text(1, n, seed=n) for n in LENGTHS]
    expected = torch.cat([model(each).logits for each in documents], 1)
    model._segment_length = 3
    close(model(torch.cat(documents, 1), **BOUNDS).logits, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_documents_are_packed_beside_padding(side: str) -> None:
    model = small().eval()
    documents = [text(1, n, seed=n) for n in LENGTHS]
    rows = [torch.cat(documents, 1), text(1, 5)]
    expected = [torch.cat([model(each).logits for each in documents], 1), model(rows[1]).logits]
    nothing = torch.zeros(1, 7, dtype=torch.long)
    order = slice(None) if side == "left" else slice(None, None, -1)
    second = torch.cat([nothing, rows[1]][order], 1)
    mask = torch.cat([nothing, torch.ones_like(rows[1])][order], 1)
    positions = torch.cat([BOUNDS["position_ids"], (mask.cumsum(1) - 1).clamp(min=0)])
    mask = torch.cat([torch.ones(1, 12), mask])
    found = model(torch.cat([rows[0], second]), mask, position_ids=positions).logits
    torch.testing.assert_close(found[:1], expected[0])
    torch.testing.assert_close(found[1:, mask[1].bool()], expected[1])


def test_flattened_batches_have_the_loss_of_padded_ones() -> None:
    model = small().eval()
    data = [{"input_ids": text(1, n, seed=n)[0].tolist()} for n in LENGTHS]
    padded = DataCollatorForLanguageModeling(fast_tokenizer(ByteTokenizer()), mlm=False)(data)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    torch.testing.assert_close(model(**collator(data)).loss, model(**padded).loss)


def test_positions_that_are_no_documents_are_refused() -> None:
    mask = torch.tensor([[1, 0, 1]])
    with pytest.raises(MemspanError, match="begin anew with a document"):
        small()(text(1, 3), mask, position_ids=torch.arange(3))
    with pytest.raises(MemspanError, match="different tokens"):
        small()(text(1, 12), **{**BOUNDS, "cu_seq_lens_q": torch.tensor([0, 6, 12])})
    with pytest.raises(MemspanError, match="offsets from 0 to 3"):
        small()(text(1, 3), cu_seq_lens_q=torch.tensor([0, 4]))
    with pytest.raises(MemspanError, match=r"seq_idx must be \[1, 3\]"):
        small()(text(1, 3), seq_idx=torch.zeros(1, 2))
    classifier = MemspanForSequenceClassification(small().config)
    with pytest.raises(MemspanError, match="each document a row of its own"):
        classifier(text(1, 12), position_ids=BOUNDS["position_ids"])


def test_untied_weights_are_refused_where_there_are_only_tied_ones(tmp_path: Any) -> None:
    small().save_pretrained(tmp_path)
    with pytest.raises(MemspanError, match="no tie_word_embeddings=False"):
        AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)


def test_a_head_that_was_untied_and_trained_is_saved(tmp_path: Any) -> None:
    """As PEFT merges embeddings and heads that it trained apart."""
    model = small().eval()
    head = copy.deepcopy(model.model.head)
    torch.nn.init.normal_(head.tables[0])
    model.model.head = head
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "saved")
    fast_tokenizer(ByteTokenizer()).save_pretrained(tmp_path / "saved")
    ids = text(2, 5)
    expected = model(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded.eval()(ids).logits, expected)
    run = load(convert(tmp_path / "saved", tmp_path / "run"))
    torch.testing.assert_close(run.model(ids).logits, expected)


@every_architecture
def test_other_libraries_find_sizes_and_the_token_embedding(case: Any) -> None:
    model = wrapped(case)
    sizes = model.config.to_dict()
    assert sizes["hidden_size"] == case.backbone.d_model
    assert sizes["num_hidden_layers"] == case.backbone.n_layers
    assert sizes["num_attention_heads"] == getattr(case.backbone, "n_heads", 1)
    assert model.get_submodule("embeddings.word_embeddings") is model.model.embedding
