"""An existing tokenizer.json of the library tokenizers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from memspan.data.options import DataConfig
from memspan.data.prepared import prepare
from memspan.errors import MemspanError
from memspan.runs.config_files import load_config
from memspan.training.start import resume, train
from tiny_runs import OPTIONS

TEXT = "Ein Hase, zwei Häsinnen:\n\tthree hares <end> and 20 more!\n" * 40


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2's, with what its users add."""
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    made.enable_truncation(8)
    made.enable_padding(length=500)
    (tmp_path / "t.txt").write_text(TEXT)
    return made


def test_its_ids_are_kept(tmp_path: Path, theirs: tokenizers.Tokenizer) -> None:
    theirs.save(str(tmp_path / "own.json"))
    prepared = prepare(str(tmp_path / "t.txt"), str(tmp_path / "own.json"))
    theirs.no_truncation()
    theirs.no_padding()
    tokens = prepared.splits["train"].tokens
    text = TEXT.encode()[: prepared.splits["train"].n_bytes].decode()
    # All but the special token, which is read as the text it is.
    first = text.partition(" <end>")[0]
    assert tokens[: len(theirs.encode(first).ids)].tolist() == theirs.encode(first).ids
    assert prepared.tokenizer.decode(tokens) == text.encode()
    assert prepared.tokenizer.vocab_size == theirs.get_vocab_size()


def test_others_are_refused(tmp_path: Path, theirs: tokenizers.Tokenizer) -> None:
    path = tmp_path / "own.json"
    whole = json.loads(theirs.to_str())
    theirs.normalizer = normalizers.Lowercase()
    lower = theirs.to_str()
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str()
    spaces = json.dumps(whole | {"pre_tokenizer": {"type": "Whitespace"}})
    whole["model"]["vocab"].popitem()
    for content, says in [
        (lower, "alters the text"),
        (words, "it is WordLevel"),
        (spaces, "no plain byte-level BPE|KeyError"),
        (json.dumps(whole), "can be used"),
        ("{}", "can be used"),
        ("[" * 9999, "can be used"),
        ("", "can be used"),
    ]:
        path.write_text(content)
        with pytest.raises(MemspanError, match=says) as refusal:
            prepare(str(tmp_path / "t.txt"), str(path))
        assert "\n" not in str(refusal.value)
    path.unlink()
    with pytest.raises(MemspanError, match="cannot read"):
        prepare(str(tmp_path / "t.txt"), str(path))
    with pytest.raises(MemspanError, match=r"no tokenizer 'words\.'"):
        DataConfig(tokenizer="words.")
    with pytest.raises(MemspanError, match="vocab_size belongs"):
        DataConfig(tokenizer="own.json", vocab_size=300)


def test_a_corpus_without_training_text_is_refused_before_training(
    tmp_path: Path, theirs: tokenizers.Tokenizer
) -> None:
    theirs.save(str(tmp_path / "own.json"))
    data = DataConfig("tiny-shakespeare-held-out", str(tmp_path / "own.json"))
    with pytest.raises(MemspanError, match="tiny-shakespeare-held-out has no text to train on"):
        train(dataclasses.replace(OPTIONS, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_its_path_in_a_run_holds_from_any_folder(
    tmp_path: Path, theirs: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs.save(str(tmp_path / "own.json"))
    monkeypatch.chdir(tmp_path)
    folder = train(dataclasses.replace(OPTIONS, data=DataConfig("t.txt", "own.json")), "run")
    config = load_config(folder)
    assert config.data.tokenizer == str(tmp_path / "own.json")
    # Given again, it is no change.
    data = dataclasses.replace(config.data, tokenizer="own.json")
    more = dataclasses.replace(config.train, steps=7)
    resume(folder, config=dataclasses.replace(config, data=data, train=more))
