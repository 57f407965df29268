"""An existing tokenizer.json of the library tokenizers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import memspan
from memspan.data.options import DataConfig
from memspan.data.prepared import prepare
from memspan.data.tokenizers.base import StreamDecoder
from memspan.data.tokenizers.library import SPACE
from memspan.data.tokenizers.registry import load_tokenizer, read_tokenizer
from memspan.errors import MemspanError
from memspan.training import metrics
from memspan.training.start import train
from tiny_runs import OPTIONS

TEXT = "Ein Hase, zwei Häsinnen:\n\tthree hares <end> and 20 more!\n" * 40


@pytest.fixture(autouse=True)
def _text(own_folders: Path) -> None:
    Path("t.txt").write_text(TEXT)


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{n:02X}>" for n in range(256)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _gpt_2() -> tokenizers.Tokenizer:
    """With what its users add, which is left out."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.enable_truncation(8)
    made.enable_padding(length=500)
    return _trained(made, trainers.BpeTrainer, 300, "<end>", initial_alphabet=ALPHABET)


def _llama_3() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    made.decoder = decoders.ByteLevel()
    return _trained(made, trainers.BpeTrainer, 330, initial_alphabet=ALPHABET)


def _llama_2() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    made.normalizer = normalizers.Sequence(steps)
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    return _trained(made, trainers.BpeTrainer, 330, "<unk>", *BYTES)


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _trained(made, trainers.UnigramTrainer, 60, "<unk>", unk_token="<unk>")


def _word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return _trained(made, trainers.WordPieceTrainer, 80, "[PAD]", "[UNK]")


def _trained(
    made: tokenizers.Tokenizer, trainer: Any, size: int, *special: str, **options: Any
) -> tokenizers.Tokenizer:
    options |= {"vocab_size": size, "special_tokens": [*special], "show_progress": False}
    made.train_from_iterator([TEXT], trainer(**options))
    made.save("own.json")
    return made


@pytest.mark.parametrize(
    ("make", "kind", "first", "restores", "unknown"),
    [
        (_gpt_2, "subwords", "", True, None),
        (_llama_3, "library", "", True, None),
        (_llama_2, "library", SPACE, True, 0),
        (_unigram, "library", SPACE, True, 0),
        (_word_piece, "library", "", False, 1),
    ],
)
def test_any_model_is_read(
    make: Any, kind: str, first: str, restores: bool, unknown: int | None, tmp_path: Path
) -> None:
    theirs = make()
    found = read_tokenizer(Path("own.json"))
    found.save(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.vocabulary_hash == found.vocabulary_hash
    assert ours.vocab_size == theirs.get_vocab_size()
    text = (TEXT * 2).encode()
    ids = ours.encode(text)
    assert (ours.kind, ours.unknown) == (kind, unknown)
    theirs.no_truncation()
    theirs.no_padding()
    # A special token is read as the text that it is.
    theirs.encode_special_tokens = True
    whole = theirs.encode(text.decode(), add_special_tokens=False)
    # But for the space before the text, all the same; of a longer first token, that token.
    n = len(ids) - bool(first) * 3
    assert ids[-n:].tolist() == whole.ids[-n:]
    assert ours.alters(text, ids) is not restores
    if restores:
        assert ours.decode(ids) == text
    # In chunks, whole or not, and token by token.
    chunks = [text[n : n + 97] for n in range(0, len(text), 97)]
    pieces = list(ours.encoded(chunks))
    assert len(pieces) > 10
    assert b"".join(piece for piece, _ in pieces) == text
    assert np.concatenate([each for _, each in pieces]).tolist() == ids.tolist()
    decoder = StreamDecoder(ours)
    assert "".join(map(decoder.push, ids.tolist())).encode() == ours.decode(ids)
    # Nothing is lost in silence.
    strange = "\N{SNOWMAN}\N{OGHAM LETTER BEITH}".encode()
    lost = ours.encode(strange)
    assert ours.count_unknown(lost) or ours.decode(lost) == strange


def test_where_words_may_have_spaces_a_document_is_one_piece() -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"to be": 0, " ": 1, "[UNK]": 2}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("to be|cut\\) --|."), "isolated")
    made.save("own.json")
    ((piece, ids),) = read_tokenizer(Path("own.json")).encoded([b"to be ", b"to be"])
    assert (piece, ids.tolist()) == (b"to be to be", [0, 1, 0])


def test_what_is_not_restored_has_no_bits_per_byte(caplog: pytest.LogCaptureFixture) -> None:
    theirs = _gpt_2()
    theirs.normalizer = normalizers.Lowercase()
    theirs.save("own.json")
    train(dataclasses.replace(OPTIONS, data=DataConfig("t.txt", "own.json")), "run")
    records = metrics.read(Path("run/metrics.jsonl"))
    for split in ("train", "validation"):
        assert {record.get(f"{split}_bits_per_byte") for record in records} == {None}
    scores = memspan.evaluate("run")
    assert (scores.altered, scores.n_unknown) == (True, 0)
    assert (scores.bits_per_byte, scores.bits_per_character, scores.word_perplexity) == (None,) * 3
    assert "does not restore the text of train, validation, test" in caplog.text
    # A text that it happens to restore has them, from the cache as well.
    Path("low.txt").write_text("drei hasen. " * 9)
    for _ in range(2):
        assert memspan.evaluate("run", "low.txt", split="all").bits_per_byte


def test_what_is_no_tokenizer_is_refused() -> None:
    path, whole = Path("own.json"), json.loads(_gpt_2().to_str())
    model = whole["model"]
    gap = {**model, "vocab": dict(list(model["vocab"].items())[:-1])}
    few = models.Unigram([("a", -1.0), ("b", -1.5), (SPACE, -2.0)])
    refusals = {
        json.dumps(whole | {"model": model | {"dropout": 0.1}}): "splits it at random",
        json.dumps(whole | {"model": gap}): "can be used",
        "": "can be used",
        tokenizers.Tokenizer(few).to_str(): "no token for a part of the text .*byte fallback",
    }
    for content, says in refusals.items():
        path.write_text(content)
        with pytest.raises(MemspanError, match=says) as refusal:
            prepare("t.txt", "own.json")
        assert "\n" not in str(refusal.value)
    path.unlink()
    with pytest.raises(MemspanError, match="cannot read"):
        prepare("t.txt", "own.json")
    for read in (lambda name: DataConfig(tokenizer=name), lambda name: read_tokenizer(Path(name))):
        with pytest.raises(MemspanError, match=r"spm\.model is a SentencePiece model: .*AutoTok"):
            read("spm.model")
    with pytest.raises(MemspanError, match="vocab_size belongs"):
        DataConfig(tokenizer="own.json", vocab_size=300)
