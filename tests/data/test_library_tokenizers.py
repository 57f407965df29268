"""An existing tokenizer.json of the library tokenizers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

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
from memspan.runs.options import load_config
from memspan.training.start import resume, train
from tiny_runs import OPTIONS

TEXT = "Ein Hase, zwei Häsinnen:\n\tthree hares <end> and 20 more!\n" * 40


@pytest.fixture
def theirs(own_folders: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2's, with what its users add."""
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
    (own_folders / "t.txt").write_text(TEXT)
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


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{n:02X}>" for n in range(256)]
Made = tuple[tokenizers.Tokenizer, trainers.Trainer]


def _llama_3() -> Made:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)


def _llama_2() -> Made:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    made.normalizer = normalizers.Sequence(steps)
    spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    special = ["<unk>", *BYTES]
    return made, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)


def _unigram() -> Made:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made, trainers.UnigramTrainer(
        vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )


def _word_piece() -> Made:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made, trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["[PAD]", "[UNK]"], show_progress=False
    )


@pytest.mark.parametrize(
    ("make", "first", "restores", "unknown"),
    [
        (_llama_3, "", True, None),
        (_llama_2, SPACE, True, 0),
        (_unigram, SPACE, True, 0),
        (_word_piece, "", False, 1),
    ],
)
def test_any_model_is_read(
    make: Callable[[], Made], first: str, restores: bool, unknown: int | None, tmp_path: Path
) -> None:
    theirs, trainer = make()
    theirs.train_from_iterator([TEXT], trainer)
    theirs.save(str(tmp_path / "own.json"))
    found = read_tokenizer(tmp_path / "own.json")
    found.save(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.vocabulary_hash == found.vocabulary_hash
    text = (TEXT * 2).encode()
    ids = ours.encode(text)
    assert (ours.kind, ours.unknown) == ("library", unknown)
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


def test_where_words_may_have_spaces_a_document_is_one_piece(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"to be": 0, " ": 1, "[UNK]": 2}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("to be|cut\\) --|."), "isolated")
    made.save(str(tmp_path / "own.json"))
    ours = read_tokenizer(tmp_path / "own.json")
    ((piece, ids),) = ours.encoded([b"to be ", b"to be"])
    assert (piece, ids.tolist()) == (b"to be to be", [0, 1, 0])


def test_what_is_not_restored_has_no_bits_per_byte(
    tmp_path: Path, theirs: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    theirs.normalizer = normalizers.Lowercase()
    theirs.save(str(tmp_path / "own.json"))
    data = DataConfig(str(tmp_path / "t.txt"), str(tmp_path / "own.json"))
    folder = train(dataclasses.replace(OPTIONS, data=data), tmp_path / "run")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {record.get("train_bits_per_byte") for record in records} == {None}
    assert {record.get("validation_bits_per_byte") for record in records} == {None}
    scores = memspan.evaluate(folder)
    assert (scores.altered, scores.n_unknown) == (True, 0)
    assert (scores.bits_per_byte, scores.bits_per_character, scores.word_perplexity) == (None,) * 3
    assert "does not restore the text of train, validation, test" in caplog.text
    # A text that it happens to restore has them, from the cache as well.
    (tmp_path / "low.txt").write_text("drei hasen. " * 9)
    for _ in range(2):
        assert memspan.evaluate(folder, str(tmp_path / "low.txt"), split="all").bits_per_byte


def test_a_tokenizer_without_a_token_for_what_is_unknown(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("b", -1.5), ("▁", -2.0)]))
    made.save(str(tmp_path / "own.json"))
    (tmp_path / "t.txt").write_text("abc " * 50)
    with pytest.raises(MemspanError, match=r"no token for a part of the text .*byte fallback"):
        prepare(str(tmp_path / "t.txt"), str(tmp_path / "own.json"))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, theirs: tokenizers.Tokenizer) -> None:
    path = tmp_path / "own.json"
    whole = json.loads(theirs.to_str())
    dropping = json.dumps(whole | {"model": whole["model"] | {"dropout": 0.1}})
    whole["model"]["vocab"].popitem()
    refusals = {
        dropping: "splits it at random",
        json.dumps(whole): "can be used",
        "": "can be used",
    }
    for content, says in refusals.items():
        path.write_text(content)
        with pytest.raises(MemspanError, match=says) as refusal:
            prepare(str(tmp_path / "t.txt"), str(path))
        assert "\n" not in str(refusal.value)
    path.unlink()
    with pytest.raises(MemspanError, match="cannot read"):
        prepare(str(tmp_path / "t.txt"), str(path))
    for read in (lambda name: DataConfig(tokenizer=name), lambda name: read_tokenizer(Path(name))):
        with pytest.raises(MemspanError, match=r"spm\.model is a SentencePiece model: .*AutoTok"):
            read("spm.model")
    with pytest.raises(MemspanError, match="vocab_size belongs"):
        DataConfig(tokenizer="own.json", vocab_size=300)


def test_its_path_in_a_run_holds_from_any_folder(
    tmp_path: Path, theirs: tokenizers.Tokenizer
) -> None:
    theirs.save("own.json")
    folder = train(dataclasses.replace(OPTIONS, data=DataConfig("t.txt", "own.json")), "run")
    config = load_config(folder)
    assert config.data.tokenizer == str(tmp_path / "own.json")
    # Given again, it is no change.
    data = dataclasses.replace(config.data, tokenizer="own.json")
    more = dataclasses.replace(config.train, steps=7)
    resume(folder, config=dataclasses.replace(config, data=data, train=more))
