"""Token files: ids as a flat memory map, with a JSON header beside them.

The identity of a corpus, wherever it is: each split's tokens, and where its documents start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memspan.errors import MemspanError
from memspan.files.disk import write_atomically
from memspan.lab.data.tokenizers.base import Tokenizer

FORMAT = "memspan-tokens-4"
TOKENS, BORDERS = "tokens", "document_starts"
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
    """Whether decoding does not restore the text, see :meth:`Tokenizer.alters`."""
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
    sums, starts, n_tokens, n_bytes, altered = hashlib.sha256(), [], 0, 0, False
    respaced = False

    def content() -> Iterator[bytes]:
        nonlocal n_tokens, n_bytes, altered, respaced
        for document in documents:
            starts.append(n_tokens)
            for text, ids in document:
                piece = ids.astype(tokenizer.dtype.newbyteorder("<")).tobytes()
                sums.update(piece)
                n_tokens, n_bytes = n_tokens + len(ids), n_bytes + len(text)
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
        dtype, n_tokens = np.dtype(header["dtype"]).newbyteorder("<"), header["n_tokens"]
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
            # Older files are of tokenisers that restore every text.
            altered=bool(header.get("altered")),
            respaced=bool(header.get("respaced")),
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
    """An identity as a checkpoint records it; old ones recorded only the hash of the training tokens.

    Raises:
        ValueError: it is not an identity.
    """
    if isinstance(value, str):
        return {"train": {TOKENS: value}}
    if not isinstance(value, dict) or not all(isinstance(split, dict) for split in value.values()):
        raise ValueError("its corpus has no splits")
    return value


def difference(known: Identity, found: Identity, among: Iterable[str] | None = None) -> str | None:
    """How ``found`` differs from what a run recorded, in a few words; None if it does not.

    Args:
        known: what the run recorded; nothing else is compared.
        found: the identity of the present corpus.
        among: the splits to compare (None: all, and there must be no others).
    """
    # Of an old run not all splits, and not where documents start, may be known.
    whole = bool(known) and all(BORDERS in split for split in known.values())
    # In the order of the text.
    for name in dict.fromkeys([*found, *known]) if among is None else among:
        before, now = known.get(name), found.get(name)
        if before is None and not whole:
            continue
        if before is None or now is None:
            return f"its {name} split is {'new' if before is None else 'missing'}"
        if before.get(TOKENS) != now[TOKENS]:
            return f"its {name} split is another text"
        if BORDERS in before and before[BORDERS] != now[BORDERS]:
            return f"the documents of its {name} split begin elsewhere"
    return None
