"""Token files: ids as a flat memory map, each with a JSON header.

The identity of a corpus, wherever it is: each split's tokens, and where its documents start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from memspan.errors import MemspanError
from memspan.files.disk import write_atomically
from memspan.lab.data.tokenizers.base import Tokenizer

FORMAT = "memspan-tokens-4"
TOKENS = "tokens"
BORDERS = "document_starts"
Identity = dict[str, dict[str, str]]
"""SHA-256 of each split's tokens, and of the indices at which its documents start."""


@dataclass(frozen=True)
class TokenFile:
    """A tokenised text."""

    tokens: np.ndarray
    """Ids, 1-D, memory-mapped."""
    document_starts: np.ndarray
    """Index of every document's first token, int64."""
    n_bytes: int
    """Bytes of the text."""
    vocabulary_hash: str
    sha256: str
    """SHA-256 of the ids."""
    altered: bool = False
    """True if decoding does not restore the text, see :meth:`Tokenizer.alters`."""
    respaced: bool = False
    """True if the space between its words is not restored, see :meth:`Tokenizer.respaces`."""


def write_tokens(
    path: Path, documents: Iterable[Iterable[tuple[bytes, np.ndarray]]], tokenizer: Tokenizer
) -> TokenFile:
    """Write ``path`` (``.bin``) and its header (``.json``), with one piece at a time in memory.

    Args:
        path: the file of ids.
        documents: each document's text and ids, in pieces.
        tokenizer: what made them.
    """
    sums = hashlib.sha256()
    starts = []
    n_tokens = 0
    n_bytes = 0
    altered = False
    respaced = False

    def content() -> Iterator[bytes]:
        nonlocal n_tokens, n_bytes, altered, respaced
        for document in documents:
            starts.append(n_tokens)
            for text, ids in document:
                piece = ids.astype(tokenizer.dtype.newbyteorder("<")).tobytes()
                sums.update(piece)
                n_tokens += len(ids)
                n_bytes += len(text)
                altered = altered or tokenizer.alters(text, ids)
                respaced = respaced or tokenizer.respaces(text)
                yield piece

    write_atomically(path, content())
    header: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.kind,
        "vocabulary_hash": tokenizer.vocabulary_hash,
        "vocab_size": tokenizer.vocab_size,
        "dtype": tokenizer.dtype.name,
        "n_tokens": n_tokens,
        "n_bytes": n_bytes,
        "document_starts": starts,
        "sha256": sums.hexdigest(),
        "altered": altered,
        "respaced": respaced,
    }
    header["header_sha256"] = _check(header)
    write_atomically(path.with_suffix(".json"), json.dumps(header).encode())
    return read_tokens(path)


def read_tokens(path: Path) -> TokenFile:
    """Map a token file into memory.

    Raises:
        MemspanError: it or its header is missing, truncated or altered.
    """
    remedy = "delete it and prepare the corpus again"
    try:
        header = json.loads(path.with_suffix(".json").read_bytes())
        if header["format"] != FORMAT or header.pop("header_sha256") != _check(header):
            raise ValueError("its header is of another version, or its checksum is wrong")
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        n_tokens = header["n_tokens"]
        size = path.stat().st_size
        if size != n_tokens * dtype.itemsize:
            raise ValueError(f"{size:,} bytes instead of {n_tokens * dtype.itemsize:,}")
        # Read, not mapped: pages read through a map stay in memory.
        with open(path, "rb") as file:
            if hashlib.file_digest(file, hashlib.sha256).hexdigest() != header["sha256"]:
                raise ValueError("its checksum is wrong")
        return TokenFile(
            # An empty file cannot be mapped.
            tokens=np.memmap(path, dtype, "r") if n_tokens else np.empty(0, dtype),
            document_starts=np.asarray(header["document_starts"], dtype=np.int64),
            n_bytes=header["n_bytes"],
            vocabulary_hash=header["vocabulary_hash"],
            sha256=header["sha256"],
            altered=header["altered"],
            respaced=header["respaced"],
        )
    except FileNotFoundError as error:
        raise MemspanError(f"{error.filename} is missing: {remedy}") from None
    # A damaged header may hold anything.
    except Exception as error:
        raise MemspanError(f"{path} is damaged ({error}): {remedy}") from None


def _check(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


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
    """An identity as a checkpoint records it; empty for a converted run.

    Raises:
        ValueError: it is not an identity.
    """
    splits = value.values() if isinstance(value, dict) else [None]
    if not all(isinstance(split, dict) and {*split} == {TOKENS, BORDERS} for split in splits):
        raise ValueError("its corpus has no splits")
    return cast(Identity, value)


def difference(known: Identity, found: Identity, among: Iterable[str] | None = None) -> str | None:
    """Describe the difference between ``found`` and what a run recorded; None if it does not, or if the
    run recorded nothing.

    Args:
        known: what the run recorded.
        found: the identity of the present corpus.
        among: the splits to compare (None: all, and there must be no others).
    """
    if not known:
        return None
    # In the order of the text.
    for name in dict.fromkeys([*found, *known]) if among is None else among:
        before = known.get(name)
        now = found.get(name)
        if before is None or now is None:
            return f"its {name} split is {'new' if before is None else 'missing'}"
        if before[TOKENS] != now[TOKENS]:
            return f"its {name} split is another text"
        if before[BORDERS] != now[BORDERS]:
            return f"the documents of its {name} split begin elsewhere"
    return None
