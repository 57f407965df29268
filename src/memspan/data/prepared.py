"""A corpus, tokenised: read from the cache where it is there, made and kept where it is not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from memspan.data.corpora import Corpus, load_corpus
from memspan.data.download import cache_folder
from memspan.data.token_files import TokenFile, read_tokens, write_tokens
from memspan.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from memspan.errors import MemspanError


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus."""

    tokenizer: Tokenizer
    splits: dict[str, TokenFile]
    record: dict[str, Any]
    """The corpus's name, hash and source."""


def prepare(
    corpus: str,
    kind: str,
    vocab_size: int | None = None,
    *,
    with_tokenizer: Tokenizer | None = None,
    progress: bool = True,
) -> Prepared:
    """Tokenise a corpus, or find it tokenised in the cache.

    Args:
        corpus: a name or a path, see :func:`memspan.data.corpora.load_corpus`.
        kind: which tokeniser to make from the training split.
        vocab_size: its largest vocabulary, for words and sub-words.
        with_tokenizer: use this one, a run's, instead of making one.
        progress: show a bar on a terminal's standard error.

    Raises:
        MemspanError: no such text, or one that the tokeniser cannot read; a full disk.
    """
    text = load_corpus(corpus)
    if with_tokenizer is None:
        recipe = {"corpus": text.record["sha256"], "kind": kind, "vocab_size": vocab_size}
    else:
        recipe = {"corpus": text.record["sha256"], "vocabulary": with_tokenizer.vocabulary_hash}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_folder() / "tokens" / key
    tokenizer = with_tokenizer
    try:
        tokenizer = tokenizer or load_tokenizer(folder)
        splits = {name: read_tokens(folder / f"{name}.bin") for name in text.splits}
        if any(s.vocabulary_hash != tokenizer.vocabulary_hash for s in splits.values()):
            raise MemspanError("the tokens are another tokeniser's")
    except MemspanError:
        # Not there yet, or damaged: the cache can always be made again.
        tokenizer = with_tokenizer or train_tokenizer(kind, text.splits["train"], vocab_size)
        splits = _tokenise(text, tokenizer, folder, progress)
    return Prepared(tokenizer, splits, text.record)


def _tokenise(
    text: Corpus, tokenizer: Tokenizer, folder: Path, progress: bool
) -> dict[str, TokenFile]:
    splits = {}
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not (progress and console.is_terminal)
    ) as bar:
        for name, documents in text.splits.items():
            n_bytes = sum(map(len, documents))
            task = bar.add_task(f"tokenising {name}", total=n_bytes)
            ids, n_characters, n_words = [], 0, 0
            for document in documents:
                ids.append(tokenizer.encode(document))
                characters = document.decode("utf-8", errors="replace")
                n_characters += len(characters)
                n_words += len(characters.split())
                bar.advance(task, len(document))
            splits[name] = write_tokens(
                folder / f"{name}.bin",
                ids,
                n_bytes,
                tokenizer,
                n_characters=n_characters,
                n_words=n_words,
            )
    tokenizer.save(folder)
    return splits
