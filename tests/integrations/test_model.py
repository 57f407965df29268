"""Exported models compute in transformers what memspan computes, for every architecture."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from architectures import CASES, ONE_OF_EACH, VOCABULARY, Case
from memspan.errors import MemspanError
from memspan.lab.generation.drawing import draw, draw_tokens
from memspan.lab.integrations.transformers import MemspanCache, MemspanConfig, MemspanForCausalLM
from memspan.lab.sampling import Sampling
from memspan.models import LanguageModel
from memspan.models.registry import MODELS

ONE_EACH = {name: CASES[first] for name, first in ONE_OF_EACH.items()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_architecture = pytest.mark.parametrize("case", ONE_EACH.values(), ids=ONE_EACH)
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def config_of(case: Case, **options: object) -> MemspanConfig:
    name = next(n for n, kind in MODELS.items() if isinstance(case.backbone, kind))
    return MemspanConfig(
        architecture=name,
        model=dataclasses.asdict(case.backbone),
        embedding=dataclasses.asdict(case.embedding),
        vocab_size=VOCABULARY,
        padding_id=VOCABULARY,
        **options,
    )


def wrap(case: Case, **options: object) -> MemspanForCausalLM:
    """A model of the case's weights, in float64."""
    model = MemspanForCausalLM(config_of(case, **options)).to(torch.float64).eval()
    model.model.load_state_dict(case.shared_model().state_dict())
    return model


@functools.cache
def wrapped(case: Case) -> MemspanForCausalLM:
    """One for all tests that do not change it."""
    return wrap(case)


def text(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def ours(case: Case, prompt: Tensor, n_tokens: int, sampling: Sampling) -> Tensor:
    reader = case.shared_model().reader(batch_size=len(prompt))
    drawn = [ids for ids, _ in draw_tokens(reader, reader.read(prompt)[:, -1], n_tokens, sampling)]
    return torch.cat([prompt, torch.tensor(drawn).T], 1)


@every_case
def test_saved_loaded_and_generating_as_ours(case: Case, tmp_path: Path) -> None:
    model = wrap(case)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    # Tied tensors are still one.
    assert len(list(loaded.parameters())) == len(list(model.model.parameters()))
    assert loaded.model.fingerprint() == case.shared_model().fingerprint()
    prompt = text(2, 7)
    written = loaded.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(written, ours(case, prompt, 6, Sampling(temperature=0)))


@every_architecture
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}, {"temperature": 1.5, "min_p": 0.05}],
    ids=str,
)
def test_tokens_are_drawn_from_the_same_distributions(
    case: Case, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same way of drawing the tokens are the same."""
    model = wrapped(case)
    prompt = text(3, 5)
    generator = torch.Generator().manual_seed(8)

    def multinomial(p: Tensor, num_samples: int) -> Tensor:
        numbers = torch.rand(len(p), num_samples, dtype=torch.float64, generator=generator)
        return draw(p, numbers)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    written = model.generate(prompt, max_new_tokens=12, do_sample=True, **{"top_k": 0, **options})
    assert torch.equal(
        written, ours(case, prompt, 12, Sampling(**{"temperature": 1, **options}, seed=8))
    )


@every_architecture
def test_beam_search_finds_what_trying_everything_finds(case: Case) -> None:
    """With a beam for every string there is."""
    prompt = text(1, 4)
    n_best = 5
    found = wrapped(case).generate(
        prompt,
        max_new_tokens=2,
        do_sample=False,
        num_beams=VOCABULARY,
        num_return_sequences=n_best,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    strings = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=2)))
    read = torch.cat([prompt.expand(len(strings), -1), strings], 1)
    # As a prompt and then token by token: in one piece it would be cut differently.
    reader = case.shared_model().reader(batch_size=len(strings))
    first = reader.read(read[:, :4])[:, -1:]
    second = reader.read(read[:, 4:5])
    scores = torch.cat([first, second], 1).log_softmax(-1).gather(2, strings[..., None]).sum((1, 2))
    best = scores.topk(n_best)
    assert torch.equal(found.sequences[:, 4:], strings[best.indices])
    assert found.sequences_scores.double() == pytest.approx(best.values, abs=1e-5)


@every_case
@pytest.mark.parametrize("side", ["left", "right", "scattered"])
def test_padded_rows_read_as_they_do_alone(case: Case, side: str) -> None:
    model = wrapped(case)
    lengths = [9, 3, 6]
    n_columns = 9
    tokens = text(3, n_columns)
    own = torch.zeros(3, n_columns, dtype=torch.long)
    for row, length in enumerate(lengths):
        columns = {"left": range(n_columns - length, n_columns), "right": range(length)}
        scattered = [n * n_columns // length for n in range(length)]
        own[row, list(columns.get(side, scattered))] = 1
    more = text(3, 2, seed=1)
    with torch.no_grad():
        output = model(tokens, attention_mask=own)
        after = model(more, cache=copy.copy(output.cache)).logits
    for row in range(3):
        alone = tokens[row, own[row] == 1][None]
        with torch.no_grad():
            expected = model(alone)
            expected_after = model(more[[row]], cache=expected.cache).logits
        close(output.logits[row, own[row] == 1], expected.logits[0])
        close(after[row], expected_after[0])
        memory = output.cache.memory.select([row])
        assert int(memory.tokens_seen) == lengths[row]


@pytest.mark.smoke
@every_architecture
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_write_as_they_do_alone(case: Case, side: str) -> None:
    """Without a mask: the padding token says enough. And where prompts are read in chunks."""
    model = wrapped(case)
    prompts = [text(1, n, seed=n) for n in (8, 3, 5)]
    padded = torch.full((3, 8), VOCABULARY)
    for row, prompt in zip(padded, prompts, strict=True):
        n = prompt.shape[1]
        row[slice(n) if side == "right" else slice(8 - n, 8)] = prompt[0]
    options = {"max_new_tokens": 5, "do_sample": False}
    read = model(padded).logits
    together = model.generate(padded, **options)
    for row, prompt in enumerate(prompts):
        close(read[row, -1], model(prompt).logits[0, -1])
        alone = model.generate(prompt, **options)
        assert torch.equal(together[row, -5:], alone[0, -5:])
    if case.cut_invariant:
        assert torch.equal(model.generate(padded, prefill_chunk_size=3, **options), together)


@pytest.mark.smoke
@every_architecture
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_carries_over_several_calls(case: Case, name: str) -> None:
    """With the whole text again, or with what is new alone: from the memory, or with a long mask."""
    model = wrapped(case)
    options = {"max_new_tokens": 3, "do_sample": False}
    reader = case.shared_model().reader()
    reader.read(text(1, 6))
    cache = MemspanCache()
    output = model(text(1, 6), **{name: cache})
    assert output.cache is output.past_key_values is cache
    begun = copy.deepcopy(cache)
    new = text(1, 4, seed=1)
    drawn = draw_tokens(reader, reader.read(new)[:, -1], 3, Sampling(temperature=0))
    expected = [ids for ids, _ in drawn]
    whole = torch.cat([text(1, 6), new], 1)
    calls: list[tuple[Tensor, MemspanCache, dict[str, Any]]] = [
        (whole, cache, {}),
        (new, MemspanCache(begun.memory), {}),
        (new, begun, {"attention_mask": torch.ones_like(whole)}),
    ]
    for tokens, past, more in calls:
        before = past.get_seq_length()
        written = model.generate(tokens, **{name: past}, **options, **more)
        assert written[:, -3:].tolist() == [list(itertools.chain(*expected))]
        # The last token is written and not read yet.
        assert past.get_seq_length() == before + 4 + 2
        assert int(past.memory.tokens_seen) == 12


@every_architecture
def test_long_inputs_are_read_in_segments(case: Case) -> None:
    model = wrap(case, segment_length=4)
    tokens = text(2, 10)
    reader = case.shared_model().reader(batch_size=2)
    expected = torch.cat([reader.read(tokens[:, n : n + 4]) for n in (0, 4, 8)], 1)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            close(model(tokens).logits, expected)
            close(model(tokens, logits_to_keep=3).logits, expected[:, -3:])
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    every = model(tokens, attention_mask=mask).logits
    for n in (1, 2, 10):
        some = model(tokens, attention_mask=mask, logits_to_keep=n).logits
        assert torch.equal(some, every[:, -n:])


@every_case
def test_training_is_ours(case: Case) -> None:
    """Two segments with memory carried, one of them padded: loss and every gradient."""
    model = wrap(case).train()
    reference = case.model().train()
    tokens = text(2, 13)
    cache = MemspanCache()
    memory = None
    lengths = torch.tensor([6, 4])
    for start, rows in ((0, None), (6, lengths)):
        inputs = tokens[:, start : start + 6]
        targets = tokens[:, start + 1 : start + 7]
        mask = None if rows is None else (torch.arange(6) < rows[:, None]).long()
        # Random features may be drawn again.
        torch.manual_seed(start)
        output = model(inputs, mask, cache=cache.detach_(), shift_labels=targets)
        torch.manual_seed(start)
        expected = reference(inputs, memory, targets=targets, lengths=rows)
        memory = expected.memory.detach()
        close(output.loss, expected.loss)
        output.loss.backward()
        expected.loss.backward()
    for name, parameter in reference.named_parameters():
        close(model.model.get_parameter(name).grad, parameter.grad)


@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_is_ours_and_changes_nothing() -> None:
    model = wrap(ONE_EACH["feedback"]).train()
    tokens = text(2, 24)
    found = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        found.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert model.is_gradient_checkpointing
    assert model.model.recompute
    assert all(map(torch.equal, *found))


def test_losses_are_shifted_masked_and_divided() -> None:
    case = ONE_EACH["compressive"]
    model = wrap(case)
    tokens = text(2, 8)
    logits = model(tokens).logits
    nats = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(2, 7)
    close(model(tokens, labels=tokens).loss, nats.mean())
    close(model(tokens, labels=tokens, num_items_in_batch=28).loss, nats.sum() / 28)
    close(model(tokens, labels=tokens.where(tokens > 4, -100)).loss, nats[tokens[:, 1:] > 4].mean())
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    close(model(tokens, mask, labels=tokens).loss, torch.cat([nats[0, :4], nats[1]]).mean())
    # What trains the compression is no part of a score.
    assert model.train()(tokens, labels=tokens).loss > nats.mean()


def test_rows_of_a_cache() -> None:
    model = wrapped(ONE_EACH["lstm"])
    cache = model(text(2, 5)).cache
    assert cache.batch_size == 2
    assert repr(cache) == f"MemspanCache({cache.memory!r})"
    more = text(1, 1)
    expected = model(more.expand(2, -1), cache=copy.copy(cache)).logits
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([False, True, True, True]))
    assert torch.equal(model(more.expand(3, -1), cache=cache).logits, expected[[0, 1, 1]])
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.memory) == (-1, 0, None)


def test_a_cache_reads_on_with_changed_weights() -> None:
    model = wrap(ONE_EACH["feedback"])
    with torch.no_grad():
        cache = model(text(1, 5)).cache
        model.get_input_embeddings().tables[0].mul_(2)
        expected = model.model(text(1, 2), cache.memory).logits
        close(model(text(1, 2), cache=cache).logits, expected)


def test_half_precision(tmp_path: Path) -> None:
    wrap(ONE_EACH["transformer-xl"]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model(text(1, 4)).logits.dtype == torch.bfloat16
    assert model.generate(text(1, 4), max_new_tokens=3).shape == (1, 7)


def past(model: MemspanForCausalLM) -> MemspanCache:
    """After three tokens of one row."""
    return model(text(1, 3)).cache


FEW = {"max_new_tokens": 2}
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "input_ids or inputs_embeds, one of the two": lambda m: m(),
    "one of the two": lambda m: m(text(1, 3), inputs_embeds=m.model.embedding(text(1, 3))),
    r"x must be a float64 tensor \[rows, length": lambda m: m(inputs_embeds=torch.zeros(1, 3, 1)),
    "output_attentions: not for this model": lambda m: m(text(1, 3), output_attentions=True),
    r"position_ids must be \[1, 3\]": lambda m: m(text(1, 3), position_ids=torch.arange(4)),
    "begin anew with a document": lambda m: m(
        text(1, 4), position_ids=torch.tensor([[0, 1, 3, 4]])
    ),
    "tokens must be an int64 tensor .* float32": lambda m: m(torch.zeros(1, 3)),
    "token .* is not in the vocabulary": lambda m: m(text(1, 3) + 90),
    "target .* is not in the vocabulary": lambda m: m(text(1, 3), labels=text(1, 3) + 90),
    "cover the 3 new columns, or all 3": lambda m: m(text(2, 3), torch.ones(2, 2)),
    r"all 6: it is \[1, 7\]": lambda m: m(text(1, 3), torch.ones(1, 7), past(m)),
    "must have 1 rows": lambda m: m(text(1, 3), torch.ones(2, 3)),
    "not a DynamicCache": lambda m: m(text(1, 3), cache=DynamicCache()),
    "two names of one cache": lambda m: m(text(1, 3), cache=past(m), past_key_values=past(m)),
    "temperature: not for this model, leave it out": lambda m: m(text(1, 3), temperature=1),
    "the cache has 1 row and the input 2": lambda m: m(text(2, 3), cache=past(m)),
    "the cache is of another model": lambda m: m(text(1, 3), cache=past(wrapped(ONE_EACH["lstm"]))),
    "the cache has read 3 columns and the input has 3": lambda m: m.generate(
        text(1, 3), cache=past(m), **FEW
    ),
    "no tokens: give a prompt": lambda m: m.generate(text(1, 0), **FEW),
    "cache_implementation is not for .* leave it out": lambda m: m.generate(
        text(1, 3), cache_implementation="static", **FEW
    ),
    "continuous batching page keys and values": lambda m: m.generate_batch([[1, 2]]),
    "logits_to_keep must be a number": lambda m: m(text(1, 3), logits_to_keep=-1),
    "cannot be cropped": lambda m: past(m).crop(-1),
    "vocab_size must be an integer": lambda m: m.resize_token_embeddings(-1),
    "no architecture 'rnn': use one of": lambda m: MemspanConfig("rnn"),
    "perhaps model.n_layers is meant": lambda m: MemspanConfig(model={"n_layer": 2}),
    "segment_length must be an integer": lambda m: MemspanConfig(segment_length=0),
    "outside of 0 .. 255": lambda m: MemspanConfig(padding_id=3),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(words: str) -> None:
    with pytest.raises(MemspanError, match=words) as caught:
        MISTAKES[words](wrapped(ONE_EACH["feedback"]))
    assert "\n" not in str(caught.value)


DAMAGE: dict[str, Any] = {
    r"head\.biases\.0 has values that are not finite": lambda w: w["model.head.biases.0"][3:].fill_(
        torch.nan
    ),
    "the weights lack bias": lambda w: w.pop("model.backbone.layers.0.attention_norm.bias"),
    "the weights lack projection": lambda w: w.pop("model.backbone.layers.0.attention.projection"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damaged_weights_are_refused(words: str, tmp_path: Path) -> None:
    wrap(CASES["fast-delta-favor"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    DAMAGE[words](weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MemspanError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_new_model_is_initialised_as_ours() -> None:
    case = ONE_EACH["transformer-xl"]
    torch.manual_seed(0)
    made = MemspanForCausalLM(config_of(case)).model
    torch.manual_seed(0)
    expected = LanguageModel(VOCABULARY, case.backbone, case.embedding)
    assert made.fingerprint() == expected.fingerprint()
    # To be filled later.
    with torch.device("meta"):
        assert MemspanForCausalLM(config_of(case)).device.type == "meta"
