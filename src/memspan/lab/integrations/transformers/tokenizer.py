"""memspan's tokenisers as those of transformers: the same ids, and the same text back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from transformers import PreTrainedTokenizerFast

from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.base import Tokenizer
from memspan.lab.data.tokenizers.library import LibraryTokenizer, SubwordTokenizer, byte_level_bytes
from memspan.lab.data.tokenizers.plain import (
    END_OF_LINE,
    UNKNOWN,
    ByteTokenizer,
    CharacterTokenizer,
    WordTokenizer,
)


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokeniser for transformers, which saves it as a plain ``tokenizer.json``.

    Texts are strings there, so it does not read bytes that are not UTF-8. Its only special token pads
    batches. That is not in the vocabulary: it has no embedding, and texts do not contain it.

    Raises:
        MemspanError: its kind has no equivalent in transformers.
    """
    make = PIPELINES.get(type(tokenizer))
    if make is None:
        raise MemspanError(
            f"a tokenizer of kind {tokenizer.kind} cannot be exported: use one of "
            f"{', '.join(kind.kind for kind in PIPELINES)}"
        )
    pipeline = make(tokenizer)
    padding = "<pad>"
    while padding in pipeline.get_vocab():
        padding = f"<{padding}>"
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        pad_token=padding,
        padding_side="left",
        # A text that contains "<pad>" means those five characters.
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes(tokenizer: ByteTokenizer) -> Pipeline:
    """Byte-level BPE that merges nothing: every byte stays alone."""
    letters = {byte: letter for letter, byte in byte_level_bytes().items()}
    values = range(256) if tokenizer.values is None else tokenizer.values
    pipeline = Pipeline(models.BPE({letters[byte]: n for n, byte in enumerate(values)}, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _characters(tokenizer: CharacterTokenizer) -> Pipeline:
    """Every character is a separate word."""
    others = [] if tokenizer.unknown is None else [UNKNOWN]
    ids = {token: n for n, token in enumerate([*others, *tokenizer.characters])}
    pipeline = Pipeline(models.WordLevel(ids, unk_token=UNKNOWN))
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    unknown = decoders.Replace(Regex(rf"\A{UNKNOWN}\z"), "\N{REPLACEMENT CHARACTER}")
    pipeline.decoder = decoders.Sequence([unknown, decoders.Fuse()])
    return pipeline


def _words(tokenizer: WordTokenizer) -> Pipeline:
    """Words between what Python calls white space; the end of a line is a word, if there is one."""
    ids = {word: n for n, word in enumerate(tokenizer.words)}
    unknown = UNKNOWN if tokenizer.unknown is None else tokenizer.words[tokenizer.unknown]
    space = "".join(f"\\x{{{n:x}}}" for n in range(sys.maxunicode + 1) if chr(n).isspace())
    pipeline = Pipeline(models.WordLevel(ids, unk_token=unknown))
    steps: list[Any] = [normalizers.Replace("\n", f" {END_OF_LINE} ")] if END_OF_LINE in ids else []
    if tokenizer.lower_case:
        # The library lowers characters one by one, but a sigma at a word's end has its own letter.
        sigma = r"(?<=\p{Cased}\p{Case_Ignorable}*)Σ(?!\p{Case_Ignorable}*\p{Cased})"
        steps += [normalizers.Replace(Regex(sigma), "ς"), normalizers.Lowercase()]
    pipeline.normalizer = normalizers.Sequence(steps)
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{space}]+"), "removed")
    pipeline.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(rf"\A{END_OF_LINE}\z"), "\n"),
            # Puts spaces between words: none begins with one.
            decoders.WordPiece(prefix=" ", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    return pipeline


def _subwords(tokenizer: SubwordTokenizer) -> Pipeline:
    """The subword tokeniser's own pipeline, which can also decode here."""
    pipeline = Pipeline.from_str(str(tokenizer.content()["model"]))
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


PIPELINES: dict[type[Tokenizer], Callable[[Any], Pipeline]] = {
    ByteTokenizer: _bytes,
    CharacterTokenizer: _characters,
    WordTokenizer: _words,
    SubwordTokenizer: _subwords,
    LibraryTokenizer: lambda tokenizer: Pipeline.from_str(str(tokenizer.content()["model"])),
}
