"""A text in the tokens of a run, to score it or to measure with it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from memspan.errors import MemspanError
from memspan.lab.data.corpora import ALL, has_fields, missing
from memspan.lab.data.prepared import TokenizedCorpus, prepare
from memspan.lab.data.token_files import difference, identity
from memspan.lab.runs.run import Run


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
    """True if this is the text that the run was trained on (None: a converted run has none)."""
    altered: bool
    """True if decoding the tokens does not restore the text."""


def text_of(run: Run, corpus: str | None, field: str | None, split: str, progress: bool) -> RunText:
    """Tokenise a split of a corpus (None: the run's own) for a run; ``field`` None: as in training.

    Cautions are logged as warnings of the logger ``memspan``.
    """
    log = logging.getLogger("memspan")
    prepared = _prepared(run, corpus, field, split, progress)
    name = prepared.corpus.record["name"]
    for line in prepared.notices():
        log.warning(line)
    tokens, starts, altered = split_of(prepared, name, split)
    changed = None
    if known := bool(run.corpus):
        # The text that the run was trained on was divided.
        parts = prepared.splits
        if split == ALL:
            parts = _prepared(run, corpus, field, split, progress, whole=False).splits
        changed = difference(run.corpus, identity(parts), parts if split == ALL else [split])
    if changed and corpus is None:
        log.warning(
            f"{name} has changed since {run.folder} was trained on it ({changed}): the score is not "
            "comparable with earlier ones, and the scored text may have been trained on"
        )
    as_in_training = changed is None if known else None
    starts_used = starts if run.config.data.document_reset else None
    return RunText(name, tokens, starts_used, as_in_training, altered)


def _prepared(
    run: Run,
    corpus: str | None,
    field: str | None,
    split: str,
    progress: bool,
    whole: bool | None = None,
) -> TokenizedCorpus:
    """The text in the run's tokens; of the run's own texts, only the one that the split needs, since
    other splits may be cut from the training text."""
    data = run.config.data
    texts = corpus or data.texts
    if not isinstance(texts, str) and split != "train" and split in texts:
        texts = {split: texts[split]}
    if corpus is None and field is not None:
        raise MemspanError(
            f"field {field!r} needs a corpus (--corpus): the run's own corpus has its field recorded"
        )
    if corpus is not None:
        check_field(corpus, field)
    if corpus is None and (option := missing(texts)):
        part = "" if option == "corpus" else " --split all"
        raise MemspanError(
            f"the {option} text of {run.folder} is not at {getattr(data, option)}: give its new path "
            f"with --corpus PATH{part}, or the argument corpus"
        )
    return prepare(
        texts,
        data.tokenizer,
        data.vocab_size,
        field=field or data.field,
        with_tokenizer=run.tokenizer,
        progress=progress,
        whole=split == ALL if whole is None else whole,
    )


def check_field(corpus: str, field: str | None) -> None:
    """Raise if a field is given for a text that has none."""
    if field is not None and not has_fields(corpus):
        raise MemspanError(
            f"field {field!r} is for JSON Lines, CSV, Parquet and data sets, which {corpus} is "
            "not: drop it"
        )


def split_of(
    prepared: TokenizedCorpus, corpus: str, name: str
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The tokens of a split, the indices at which documents start, and True if decoding does not
    restore the text."""
    if name not in prepared.splits:
        raise MemspanError(
            f"{corpus} has no split {name}: use {', '.join(prepared.splits)} or {ALL}"
        )
    split = prepared.splits[name]
    return split.tokens, split.document_starts, split.altered
