"""The identity of a corpus, wherever it is: each split's tokens, and where its documents start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from memspan.data.token_files import TokenFile

TOKENS, BORDERS = "tokens", "document_starts"
Identity = dict[str, dict[str, str]]
"""SHA-256 of each split's tokens, and of the indices at which its documents start."""


def identity(splits: Mapping[str, TokenFile]) -> Identity:
    """The identity of a tokenised corpus, plain JSON values."""
    return {
        name: {
            TOKENS: split.sha256,
            BORDERS: hashlib.sha256(split.document_starts.astype(np.dtype("<i8")).data).hexdigest(),
        }
        for name, split in splits.items()
    }


def recorded(value: object) -> Identity:
    """An identity as a checkpoint records it; old ones recorded only the hash of the training tokens.

    Raises:
        ValueError: it is not an identity.
    """
    if isinstance(value, str):
        return {"train": {TOKENS: value}}
    if not isinstance(value, dict) or not all(isinstance(split, dict) for split in value.values()):
        raise ValueError("its corpus has no splits")
    return value


def is_whole(known: Identity) -> bool:
    """Whether an identity covers all splits and the starts of their documents."""
    return bool(known) and all(BORDERS in split for split in known.values())


def difference(known: Identity, found: Identity, among: Iterable[str] | None = None) -> str | None:
    """How ``found`` differs from what a run recorded, in a few words; None if it does not.

    Args:
        known: what the run recorded; nothing else is compared.
        found: the identity of the present corpus.
        among: the splits to compare (None: all, and there must be no others).
    """
    # In the order of the text.
    for name in dict.fromkeys([*found, *known]) if among is None else among:
        before, now = known.get(name), found.get(name)
        if before is None and not is_whole(known):
            continue
        if before is None or now is None:
            return f"its {name} split is {'new' if before is None else 'missing'}"
        if before.get(TOKENS) != now[TOKENS]:
            return f"its {name} split is another text"
        if BORDERS in before and before[BORDERS] != now[BORDERS]:
            return f"the documents of its {name} split begin elsewhere"
    return None
