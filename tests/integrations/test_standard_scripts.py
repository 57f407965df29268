"""Exported models in the hands of transformers' trainer and of scripts written for other models."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import operations
from test_model import ONE_EACH, every_architecture, every_case, text, wrap
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.plain import ByteTokenizer
from memspan.lab.integrations.transformers import (
    MemspanCache,
    MemspanConfig,
    MemspanForCausalLM,
    fast_tokenizer,
)
from memspan.models import LanguageModel, TransformerXLConfig
from statelaws.states import tensors_of

theirs = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
SMALL = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8}


def small(architecture: str = "transformer-xl") -> MemspanForCausalLM:
    torch.manual_seed(0)
    config = MemspanConfig(architecture, model=SMALL, vocab_size=256, padding_id=256)
    return MemspanForCausalLM(config)


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    tokenizer = fast_tokenizer(ByteTokenizer())
    data = [tokenizer(words) for words in ("To be, or not", "to be", "that is the question", "Aye")]
    own = {name: options.pop(name) for name in ("compute_metrics", "callbacks") if name in options}
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator, **own
    )


@pytest.mark.smoke
def test_the_best_model_by_eval_loss_is_kept(tmp_path: Path) -> None:
    seen: list[Any] = []
    training = trainer(
        small(),
        tmp_path,
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=3,
        load_best_model_at_end=True,
        compute_metrics=lambda found: seen.append(found) or {"rows": len(found.predictions)},
        callbacks=[EarlyStoppingCallback()],
    )
    training.train()
    scores = [each["eval_loss"] for each in training.state.log_history if "eval_loss" in each]
    assert len(scores) == 3
    assert training.state.best_metric == min(scores)
    assert seen[0].predictions.shape[0] == seen[0].label_ids.shape[0] == 4
    assert training.evaluate()["eval_rows"] == 4


@pytest.mark.smoke
@pytest.mark.parametrize("steps", [1, 2])
def test_padding_on_the_left_trains_as_on_the_right(steps: int, tmp_path: Path) -> None:
    losses = {}
    for side in ("left", "right"):
        training = trainer(
            small(),
            tmp_path / side,
            max_steps=1,
            per_device_train_batch_size=4 // steps,
            gradient_accumulation_steps=steps,
            train_sampling_strategy="sequential",
        )
        if not hasattr(training, "_loss_shifts_labels"):
            pytest.skip("this release of transformers counts labels that no model can score")
        training.data_collator.tokenizer.padding_side = side
        losses[side] = training.train().training_loss
    assert losses["left"] == pytest.approx(losses["right"], rel=1e-6 if steps == 1 else 1e-2)


def test_label_smoothing_predicts_what_comes_next(tmp_path: Path) -> None:
    def loss(smoothing: float) -> float:
        training = trainer(small().eval(), tmp_path, label_smoothing_factor=smoothing)
        # Without padding, beside which the trainer scores first tokens, too.
        batch = training.data_collator([training.train_dataset[0]] * 2)
        return float(training.compute_loss(training.model, dict(batch)).detach())

    # Logits that predict their own input well would have another loss.
    assert loss(1e-6) == pytest.approx(loss(0.0), rel=1e-4)


@theirs
def test_adapters_of_peft_are_evaluated(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    training = trainer(peft.get_peft_model(small(), config), tmp_path, max_steps=1)
    training.train()
    assert training.evaluate()["eval_loss"] > 0


@theirs
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_prompts_of_peft_are_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base = small()
    # PEFT embeds padding, too.
    base.resize_token_embeddings(257)
    model = peft.get_peft_model(base, config)
    training = trainer(model, tmp_path, max_steps=1)
    before = model.prompt_encoder.default.embedding.weight.clone()
    training.train()
    assert not model.prompt_encoder.default.embedding.weight.equal(before)
    assert model.eval().generate(input_ids=text(1, 4), max_new_tokens=2).shape == (1, 6)


@theirs
@pytest.mark.parametrize("packing", [False, True])
def test_trl_trains_a_folder_on_its_own_loss(packing: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    small().save_pretrained(tmp_path / "model")
    tokenizer = fast_tokenizer(ByteTokenizer())
    tokenizer.eos_token = "\n"
    texts = ["To be, or not to be", "Aye", "that is the question"]
    data = Dataset.from_dict({"text": texts})
    options = trl.SFTConfig(
        str(tmp_path / "run"),
        max_steps=1,
        max_length=32,
        packing=packing,
        eval_packing=packing,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    training = trl.SFTTrainer(
        str(tmp_path / "model"),
        options,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    training.train()
    found = training.evaluate()["eval_loss"]
    model = training.model.eval()
    losses = 0.0
    for words in texts:
        ids = torch.tensor([tokenizer(words + "\n")["input_ids"]])
        losses += len(words) * float(model(input_ids=ids, labels=ids).loss.detach())
    assert found == pytest.approx(losses / sum(map(len, texts)), rel=1e-4)


@pytest.mark.smoke
@every_case
@pytest.mark.parametrize("change", [-3, 0, 5])
def test_vocabularies_are_resized(case: Any, change: int, tmp_path: Path) -> None:
    model = wrap(case)
    tokens = text(2, 6)
    size = model.config.vocab_size
    tokens = tokens.clamp(max=size - 4)
    if (cutoffs := case.embedding.cutoffs) and size + change <= cutoffs[-1]:
        with pytest.raises(MemspanError, match="the last cluster"):
            model.resize_token_embeddings(size + change)
        return
    before = model(tokens).logits
    model.resize_token_embeddings(size + change)
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == size + change
    # An id that has become a token is no longer padding.
    assert model.config.padding_id == (size if change <= 0 else None)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    after = loaded(tokens).logits
    assert after.shape[2] == size + change
    if not case.embedding.cutoffs:
        torch.testing.assert_close(after[..., : size - 3], before[..., : size - 3])


@pytest.mark.smoke
@every_case
def test_hidden_states_make_the_same_logits(case: Any) -> None:
    model = wrap(case)
    tokens = text(3, 7)
    mask = torch.ones(3, 7)
    mask[0, :3] = mask[1, 4:] = 0
    expected = model(tokens, mask)
    head = model.get_output_embeddings()
    if head is None:
        with pytest.raises(MemspanError, match="adaptive softmax is not one matrix"):
            model.base_model(tokens, mask)
        return
    found = model.base_model(tokens, mask)
    assert int(found.cache.memory.tokens_seen[0]) == 4
    logits = found.last_hidden_state @ head.weight.T + head.bias
    own = mask.bool()
    torch.testing.assert_close(logits[own], expected.logits[own])


@every_architecture
def test_folders_are_read_without_their_head(case: Any, tmp_path: Path) -> None:
    model = wrap(case)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = text(2, 5)
    expected = model.base_model(tokens).last_hidden_state
    torch.testing.assert_close(loaded(tokens).last_hidden_state, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("side", ["left", "right"])
def test_classes_are_those_of_the_text_without_padding(side: str, tmp_path: Path) -> None:
    wrap(ONE_EACH["transformer-xl"]).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, dtype=torch.float64
    )
    alone = [model(text(1, n, seed=n)).logits for n in (5, 2)]
    padded = torch.zeros(2, 3, dtype=torch.int64)
    short = text(1, 2, seed=2)
    mask = torch.ones(1, 2)
    parts = [padded[:1], short] if side == "left" else [short, padded[:1]]
    masks = [torch.zeros(1, 3), mask] if side == "left" else [mask, torch.zeros(1, 3)]
    rows = torch.cat([text(1, 5, seed=5), torch.cat(parts, 1)])
    output = model(
        rows, torch.cat([torch.ones(1, 5), torch.cat(masks, 1)]), labels=torch.tensor([0, 2])
    )
    torch.testing.assert_close(output.logits, torch.cat(alone))
    output.loss.backward()
    assert model.score.weight.grad is not None


def test_losses_of_ones_own_leave_auxiliary_losses_out_with_a_warning() -> None:
    model = wrap(ONE_EACH["compressive"]).train()
    tokens = text(2, 40)
    with pytest.warns(UserWarning, match="has an auxiliary loss"):
        model(tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, labels=tokens)
        model.eval()(tokens)


def numbers(state: object) -> int:
    return sum(tensor.numel() for tensor in tensors_of(state))


@pytest.mark.smoke
def test_copies_of_a_cache_hold_its_memory_alone() -> None:
    model = wrap(ONE_EACH["transformer-xl"])
    with torch.no_grad():
        cache: MemspanCache = model(text(2, 5)).cache
    memory = cache.memory
    assert memory is not None
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    for other in copies:
        assert numbers(other) == numbers(memory) + cache.last_logits.numel()
    # Nothing is shared.
    pointers: set[int] = {tensor.data_ptr() for tensor in tensors_of(copies[0].memory)}
    assert not pointers & {tensor.data_ptr() for tensor in tensors_of(memory)}
    more: Tensor = text(2, 3, seed=1)
    expected = model(more, cache=cache).logits
    assert all(torch.equal(model(more, cache=other).logits, expected) for other in copies)


def test_a_memory_travels_through_accelerate_as_its_fields() -> None:
    """As the guide to backbones has it: what dispatches batches knows dicts of tensors alone."""
    model = LanguageModel(11, TransformerXLConfig(**SMALL, memory_length=4))
    memory = model(torch.zeros(3, 2, dtype=torch.long)).memory.detach()
    batch = {"memory": memory.tensors(), "tokens": torch.zeros(3, 2, dtype=torch.long)}
    assert operations.find_batch_size(batch) == 3
    parts = [operations.slice_tensors(batch, rows) for rows in (slice(0, 1), slice(1, 3))]
    joined = operations.concatenate(parts)
    assert type(memory)(**joined["memory"]) == memory
