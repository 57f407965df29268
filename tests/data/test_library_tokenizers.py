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
from memspan.errors import MemspanError
from memspan.lab.data.options import DataConfig
from memspan.lab.data.prepared import prepare
from memspan.lab.data.tokenizers.base import StreamDecoder
from memspan.lab.data.tokenizers.library import SPACE
from memspan.lab.data.tokenizers.registry import load_tokenizer, read_tokenizer
from memspan.lab.training import metrics
from memspan.lab.training.start import train
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
    """A tokeniser with users' additions, which are left out."""
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
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
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


def test_reads_a_document_whole_if_words_may_have_spaces() -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"to be": 0, " ": 1, "[UNK]": 2}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("to be|cut\\) --|."), "isolated")
    made.save("own.json")
    ((piece, ids),) = read_tokenizer(Path("own.json")).encoded([b"to be ", b"to be"])
    assert (piece, ids.tolist()) == (b"to be to be", [0, 1, 0])


def test_leaves_out_bits_per_byte_of_texts_not_restored(caplog: pytest.LogCaptureFixture) -> None:
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


def test_refuses_files_that_are_no_tokenizers() -> None:
    path = Path("own.json")
    whole = json.loads(_gpt_2().to_str())
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


def _with(part: str, change: Any) -> str:
    """GPT-2's file with another part."""
    whole = json.loads(_gpt_2().to_str())
    whole[part] = change(whole[part]) if callable(change) else change
    return json.dumps(whole)


def _replace(content: str, pattern: dict[str, str], times: int = 1) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


@pytest.mark.hardening
@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        (
            "model",
            lambda m: m | {"vocab": m["vocab"] | {"a": 1 << 23}},
            "tokens, and ids up to 8,3",
        ),
        ("model", lambda m: m | {"vocab": m["vocab"] | {"a": m["vocab"]["b"]}}, "same id"),
        ("model", lambda m: m | {"vocab": m["vocab"] | {"a" * 5000: 300}}, "a token of over 4,096"),
        (
            "normalizer",
            _replace("x" * 300_000, {"String": "a"}),
            "makes a text over 64 times longer",
        ),
        ("normalizer", _replace("aa", {"String": "a"}, 30), "makes a text over 64 times longer"),
        ("normalizer", _replace("x" * 80, {"Regex": ""}), "makes a text over 64 times longer"),
        ("pre_tokenizer", {"type": "Split"}, "can be used"),
    ],
)
def test_costs_of_a_file_are_bounded(part: str, change: Any, says: str) -> None:
    Path("own.json").write_text(_with(part, change))
    with pytest.raises(MemspanError, match=says):
        read_tokenizer(Path("own.json")).encode(b"to be")


@pytest.mark.hardening
@pytest.mark.parametrize("largest", [1 << 31, (1 << 32) - 1, 1 << 40, -1])
def test_an_id_beyond_all_others_costs_nothing(largest: int) -> None:
    """The library's own writer would take memory for every id below it, and end the process."""
    whole = json.loads(_word_piece().to_str())
    whole["model"]["vocab"]["three"] = largest
    Path("own.json").write_text(json.dumps(whole))
    with pytest.raises(MemspanError, match=r"vocab_size must be at most|can be used"):
        read_tokenizer(Path("own.json"))


@pytest.mark.hardening
@pytest.mark.parametrize("part", ["decoder", "normalizer", "pre_tokenizer", "post_processor"])
def test_a_part_may_be_left_out(part: str) -> None:
    whole = json.loads(_word_piece().to_str())
    del whole[part]
    Path("own.json").write_text(json.dumps(whole))
    tokenizer = read_tokenizer(Path("own.json"))
    assert isinstance(tokenizer.decode(tokenizer.encode(TEXT.encode())), bytes)


@pytest.mark.hardening
def test_a_panic_of_the_library_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Its regular expressions give up on long runs."""
    _llama_3()
    tokenizer = read_tokenizer(Path("own.json"))
    with pytest.raises(
        MemspanError, match="a pattern of the tokeniser fails on a part of the text"
    ):
        tokenizer.encode(b" " * 12_000_000)


EXOTIC: dict[str, tuple[Any, Any, Any]] = {
    "fixed length": (models.WordLevel, None, pre_tokenizers.FixedLength(7)),
    "five characters": (models.BPE, None, pre_tokenizers.Split(tokenizers.Regex(".{5}"), "isolated")),
    "first word": (models.BPE, normalizers.Replace(tokenizers.Regex("^E"), "e"), None),
    "stripped": (models.Unigram, normalizers.Strip(), pre_tokenizers.Metaspace()),
    "two words": (
        models.WordLevel, None, pre_tokenizers.Split(tokenizers.Regex(r"\w+ \w+"), "isolated"),
    ),
    "joined lines": (models.BPE, normalizers.Replace(tokenizers.Regex(r"e\s+t"), "et"), None),
    "long words": (
        lambda: models.WordPiece(unk_token="<unk>", max_input_chars_per_word=3000), None, None,
    ),
}  # fmt: skip
TRAINERS = {
    models.WordLevel: trainers.WordLevelTrainer,
    models.BPE: trainers.BpeTrainer,
    models.Unigram: trainers.UnigramTrainer,
}


@pytest.mark.hardening
@pytest.mark.parametrize(("model", "normalizer", "split"), EXOTIC.values(), ids=EXOTIC)
def test_exotic_tokenizers_give_pieces_the_tokens_of_the_whole(
    model: Any, normalizer: Any, split: Any
) -> None:
    made = tokenizers.Tokenizer(model())
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", split)):
        if part is not None:
            setattr(made, name, part)
    options = {"unk_token": "<unk>"} if model is models.Unigram else {}
    _trained(made, TRAINERS.get(model, trainers.WordPieceTrainer), 100, "<unk>", **options)
    tokenizer = read_tokenizer(Path("own.json"))
    text = TEXT.encode()
    for size in (53, 997):
        pieces = list(tokenizer.encoded(text[n : n + size] for n in range(0, len(text), size)))
        assert b"".join(piece for piece, _ in pieces) == text
        ids = np.concatenate([ids for _, ids in pieces])
        assert ids.tolist() == tokenizer.encode(text).tolist()
