"""Tokenised corpora, from the cache or added to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TaskID

from memspan.errors import MemspanError, counted
from memspan.files.disk import cache_folder, path_of
from memspan.lab.data.corpora import Corpus, load_corpus
from memspan.lab.data.encodings import UNKNOWN, described, encoding_of
from memspan.lab.data.options import Texts
from memspan.lab.data.remarks import around
from memspan.lab.data.texts import Text
from memspan.lab.data.token_files import TokenFile, read_tokens, write_tokens
from memspan.lab.data.tokenizers.base import NotUtf8Error, Tokenizer
from memspan.lab.data.tokenizers.registry import (
    KINDS,
    load_tokenizer,
    read_tokenizer,
    train_tokenizer,
)

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class TokenizedCorpus:
    """A tokenised corpus."""

    tokenizer: Tokenizer
    splits: dict[str, TokenFile]
    corpus: Corpus
    """The text itself."""

    def notices(self) -> list[str]:
        """Lines for the user: about files left out, a text that is not restored or not UTF-8."""
        lines: list[str] = []
        skipped = self.corpus.skipped
        if skipped:
            shown = ", ".join(skipped[:5])
            more = f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else ""
            are = "is" if len(skipped) == 1 else "are"
            lines.append(f"{counted(len(skipped), 'file')} {are} left out: {shown}{more}")
        # Token ids lose nothing but the form of their digits.
        altered = [name for name, split in self.splits.items() if split.altered]
        if altered and not self.corpus.holds_ids:
            lines.append(
                f"the tokeniser does not restore the text of {', '.join(altered)} (its case, spaces or "
                "rare characters are lost): bits per byte would be those of what it decodes to, and "
                "are left out of scores"
            )
        if spaced := [name for name, split in self.splits.items() if split.respaced]:
            lines.append(
                f"the words of {', '.join(spaced)} are parted by one space each: tabs, indentation and "
                "further spaces are neither learned nor scored"
            )
        return [*lines, *self.corpus.remarks]


def prepare(
    texts: Texts,
    kind: str,
    vocab_size: int | None = None,
    *,
    field: str = "text",
    with_tokenizer: Tokenizer | None = None,
    progress: bool = True,
    whole: bool = False,
) -> TokenizedCorpus:
    """Tokenise a corpus, or take it from the cache.

    Args:
        texts: a name or a path, or one for each split; see
            :func:`memspan.lab.data.corpora.load_corpus`.
        kind: which tokeniser to make from the training split, or the path of a ``tokenizer.json``.
        vocab_size: maximum size of its vocabulary, for words and sub-words.
        field: the field or column that holds the text, in JSON Lines, CSV, Parquet and data sets.
        with_tokenizer: use this one, a run's, instead.
        progress: show a bar on a terminal's standard error.
        whole: do not divide the text, so that no token is: all of it is one split.

    Raises:
        MemspanError: there is no such text, the tokeniser cannot encode it, or the disk is full.
    """
    if with_tokenizer is None and kind.endswith(".json"):
        with_tokenizer = read_tokenizer(path_of(kind))
    text = load_corpus(texts, field, whole)
    refuse_ids(text, with_tokenizer.kind if with_tokenizer else kind)
    if with_tokenizer is None:
        recipe = {"corpus": text.record["sha256"], "kind": kind, "vocab_size": vocab_size}
    else:
        recipe = {"corpus": text.record["sha256"], "vocabulary": with_tokenizer.vocabulary_hash}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder() / "tokens" / key
    try:
        tokenizer = with_tokenizer or load_tokenizer(folder)
        splits = {name: read_tokens(folder / f"{name}.bin") for name in text.splits}
        if any(s.vocabulary_hash != tokenizer.vocabulary_hash for s in splits.values()):
            raise MemspanError("the tokens are another tokeniser's")
    except MemspanError:
        # Missing or damaged: the cache can always be made again.
        console = Console(stderr=True)
        hidden = not (progress and console.is_terminal)
        with Progress(console=console, transient=True, disable=hidden) as bar:
            tokenizer = with_tokenizer or _vocabulary(text, kind, vocab_size, bar)
            splits = _tokenise(text, tokenizer, folder, bar)
    return TokenizedCorpus(tokenizer, splits, text)


def refuse_ids(text: Corpus, kind: str) -> None:
    """Refuse ids in place of text, unless the tokeniser reads ids."""
    if text.holds_ids and kind != "ids":
        raise MemspanError(
            f"{text.record['name']} holds ids, not text, and the tokeniser is {kind}: read them with "
            "--data.tokenizer ids, in a run of its own"
        )


def _vocabulary(text: Corpus, kind: str, vocab_size: int | None, bar: Progress) -> Tokenizer:
    if "train" not in text.splits:
        raise MemspanError(f"{text.record['name']} has no text to train on: choose another corpus")
    documents = text.splits["train"]
    task = bar.add_task("collecting the vocabulary", total=sum(map(len, documents)))
    pieces = (
        piece
        for document in documents
        for piece in _naming(document, KINDS[kind].pieces(_watched(document, bar, task)))
    )
    return train_tokenizer(kind, pieces, vocab_size)


def _tokenise(
    text: Corpus, tokenizer: Tokenizer, folder: Path, bar: Progress
) -> dict[str, TokenFile]:
    splits = {}
    for name, documents in text.splits.items():
        task = bar.add_task(f"tokenising {name}", total=sum(map(len, documents)))
        pieces = (
            _naming(document, tokenizer.encoded(_watched(document, bar, task)))
            for document in documents
        )
        splits[name] = write_tokens(folder / f"{name}.bin", pieces, tokenizer)
    tokenizer.save(folder)
    return splits


def _naming(document: Text, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the same pieces; an error about a text that is not UTF-8 names it."""
    try:
        yield from pieces
    except NotUtf8Error as error:
        sample = around(document, error.position)
        encoding = encoding_of(sample) or UNKNOWN
        raise NotUtf8Error(error.position, *described(document.name, encoding, sample)) from None


def _watched(document: Text, bar: Progress, task: TaskID) -> Iterator[bytes]:
    for chunk in document.chunks():
        yield chunk
        bar.advance(task, len(chunk))
