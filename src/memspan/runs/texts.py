"""A text in the tokens of a run, to score it or to measure with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from memspan.data.corpora import has_fields, missing
from memspan.data.prepared import TokenizedCorpus, prepare
from memspan.data.token_files import difference, identity
from memspan.errors import MemspanError
from memspan.runs.run import Run

ALL = "all"
"""The split that is the whole text, in order."""


@dataclass(frozen=True)
class RunText:
    """A text in a run's tokens."""

    corpus: str
    """Its name or path."""
    tokens: np.ndarray
    """Integers, 1-D."""
    document_starts: np.ndarray | None
    """The index of each document's first token (None: the run carries memory across documents)."""
    as_in_training: bool | None
    """Whether this is the text that the run was trained on (None: an old run did not record it)."""
    altered: bool
    """Whether decoding the tokens does not restore the text."""


def text_of(run: Run, corpus: str | None, field: str | None, split: str, progress: bool) -> RunText:
    """A split of a corpus (None: the run's own) in the run's tokens; ``field`` None: as in training.

    What the user should know about it is logged as a warning of the logger ``memspan``.
    """
    log = logging.getLogger("memspan")
    prepared = _prepared(run, corpus, field, split, progress)
    name = prepared.corpus.record["name"]
    for line in prepared.notices():
        log.warning(line)
    tokens, starts = split_of(prepared, name, split)
    changed = None
    if known := bool(run.corpus):
        among = prepared.splits if split == ALL else [split]
        changed = difference(run.corpus, identity(prepared.splits), among)
    if changed and corpus is None:
        log.warning(
            f"{name} has changed since {run.folder} was trained on it ({changed}): the score is not "
            "comparable with earlier ones, and the scored text may have been trained on"
        )
    as_in_training = changed is None if known else None
    starts_used = starts if run.config.data.document_reset else None
    altered = any(part.altered for name, part in prepared.splits.items() if split in (ALL, name))
    return RunText(name, tokens, starts_used, as_in_training, altered)


def _prepared(
    run: Run, corpus: str | None, field: str | None, split: str, progress: bool
) -> TokenizedCorpus:
    """The text in the run's tokens; of the run's own text, no more than the split needs. Other splits
    may be cut from the one for training."""
    data = run.config.data
    texts = corpus or data.texts
    if not isinstance(texts, str) and split != "train" and split in texts:
        texts = {split: texts[split]}
    if corpus is None and field is not None:
        raise MemspanError(
            f"field {field!r} is that of another corpus than the run's own: name the corpus, or drop it"
        )
    if corpus is not None:
        check_field(corpus, field)
    if corpus is None and (option := missing(texts)):
        whole = "" if option == "corpus" else " --split all"
        raise MemspanError(
            f"the {option} text of {run.folder} is not at {getattr(data, option)}: say where it is "
            f"with --corpus PATH{whole}, or the argument corpus"
        )
    return prepare(
        texts,
        data.tokenizer,
        data.vocab_size,
        field=field or data.field,
        with_tokenizer=run.tokenizer,
        progress=progress,
    )


def check_field(corpus: str, field: str | None) -> None:
    """Refuse a field of a text that has none."""
    if field is not None and not has_fields(corpus):
        raise MemspanError(
            f"field {field!r} is for JSON Lines, CSV, Parquet and data sets, which {corpus} is "
            "not: drop it"
        )


def split_of(prepared: TokenizedCorpus, corpus: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of one split or of all, and the indices at which documents start."""
    if name != ALL and name not in prepared.splits:
        raise MemspanError(
            f"{corpus} has no split {name}: use {', '.join(prepared.splits)} or {ALL}"
        )
    splits = list(prepared.splits.values()) if name == ALL else [prepared.splits[name]]
    if len(splits) == 1:
        # Not copied: it may be larger than memory.
        return splits[0].tokens, splits[0].document_starts
    before = np.cumsum([0, *(len(split.tokens) for split in splits[:-1])])
    starts = [split.document_starts + n for split, n in zip(splits, before, strict=True)]
    return np.concatenate([split.tokens for split in splits]), np.concatenate(starts)
