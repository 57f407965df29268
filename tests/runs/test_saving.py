"""A model from a loop of one's own becomes a run: every verb takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memspan
import tiny_runs
from architectures import randomise
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.plain import ByteTokenizer, CharacterTokenizer
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS

SIZES = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12, "memory_length": 5}


def model_of(name: str = "transformer-xl", vocab_size: int = 256) -> memspan.LanguageModel:
    options = tiny_runs.model_of(name, **SIZES)
    return randomise(memspan.LanguageModel(vocab_size, options, EmbeddingConfig(tie=False))).eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_model(name: str, tiny_text: None) -> None:
    model = model_of(name).double()
    folder = memspan.save_run(model, "r", segment_length=16)
    run = memspan.load(folder)
    assert run.model.fingerprint() == model.float().fingerprint()
    assert run.config.train.segment_length == 16
    assert memspan.generate(folder, "memory", tokens=3).text
    assert memspan.evaluate(folder, corpus="text.txt", split="all").tokens > 100


@pytest.mark.parametrize("kind", ["characters", "library"])
def test_its_own_tokeniser_comes_along(kind: str, tiny_text: None) -> None:
    tokenizer: Tokenizer | str = CharacterTokenizer("".join(sorted(set(tiny_runs.TEXT))))
    n_tokens = len(set(tiny_runs.TEXT)) + 1
    if kind == "library":
        words = {word: n for n, word in enumerate(["<unk>", *["memory", "is", "what", "remains"]])}
        rules = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
        parts = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": rules}
        rest = ("truncation", "padding", "normalizer", "post_processor", "decoder")
        parts |= dict.fromkeys(rest) | {"added_tokens": []}
        tokenizer = "words.json"
        n_tokens = len(words)
        Path(tokenizer).write_text(json.dumps(parts))
    folder = memspan.save_run(model_of(vocab_size=n_tokens), "r", tokenizer=tokenizer)
    assert memspan.load(folder).tokenizer.vocab_size == n_tokens
    loop = "--train.steps=2 --train.batch-size=2 --train.segment-length=8 --train.sample-tokens=0"
    cli.main(["train", "--resume", "r", "--data.corpus", "text.txt", *loop.split()])
    assert memspan.load(folder).step == 2


@pytest.mark.parametrize("verb", [memspan.generate, memspan.evaluate])
def test_a_model_that_is_no_run_is_told_how_to_become_one(verb: Any) -> None:
    with pytest.raises(
        MemspanError, match=r"not a LanguageModel: memspan.save_run\(model, FOLDER\)"
    ):
        verb(model_of())


def replaced() -> Any:
    model = model_of()
    model.head = nn.Linear(8, 256)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            model_of,
            {"tokenizer": CharacterTokenizer("ab")},
            r"has 3 tokens \(characters\) and the m",
        ),
        (model_of, {"tokenizer": "none.json"}, "cannot read none.json"),
        (replaced, {}, "differs from one made by its options"),
        (lambda: nn.Linear(2, 2), {}, "LanguageModel"),
        (lambda: None, {}, "LanguageModel"),
        (model_of, {"segment_length": 0}, "segment_length must be at least 1"),
    ],
    ids=["vocabulary", "file", "modules", "module", "nothing", "length"],
)
def test_models_that_cannot_be_runs_are_refused_in_one_line(
    make: Any,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemspanError, match=message) as caught:
        memspan.save_run(make(), "r", **options)
    assert "\n" not in str(caught.value)
    assert not Path("r").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MemspanError, match="exists already"):
        memspan.save_run(model_of(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert ByteTokenizer().vocab_size == model_of().vocab_size
    assert torch.is_grad_enabled()
