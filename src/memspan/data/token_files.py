"""Token files: ids as a flat memory map, with a JSON header beside them.

The identity of a corpus, wherever it is: each split's tokens, and where its documents start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memspan.data.tokenizers.base import Tokenizer
from memspan.errors import MemspanError
from memspan.files.disk import read_limited, write_atomically

FORMAT = "memspan-tokens-4"
HEADER_LIMIT = 1 << 28
"""Maximum size of a header in bytes: some ten million documents."""
CHUNK = 1 << 20
"""Bytes read at once, a multiple of every type's size."""
DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}
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
    kind: str
    """The kind of its tokeniser."""
    vocab_size: int
    vocabulary_hash: str
    sha256: str
    """SHA-256 of the ids."""
    altered: bool = False
    """Whether decoding does not restore the text, see :meth:`Tokenizer.alters`."""


def write_tokens(
    path: Path,
    documents: Iterable[Iterable[np.ndarray]],
    n_bytes: int,
    tokenizer: Tokenizer,
    altered: Callable[[], bool] = lambda: False,
) -> TokenFile:
    """Write ``path`` (``.bin``) and its header (``.json``), with one piece at a time in memory.

    Args:
        path: the file of ids.
        documents: each document's ids, in pieces.
        n_bytes: bytes of the text they encode.
        tokenizer: what made them.
        altered: called at the end, returns whether decoding does not restore the text.
    """
    dtype, sums, starts, n_tokens = tokenizer.dtype, hashlib.sha256(), [], 0

    def content() -> Iterator[bytes]:
        nonlocal n_tokens
        for document in documents:
            starts.append(n_tokens)
            for ids in document:
                if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
                    raise MemspanError(
                        f"token {int(ids.max()):,} is too large for {dtype}: prepare the corpus "
                        "again with its own tokenizer"
                    )
                piece = ids.astype(dtype.newbyteorder("<")).tobytes()
                sums.update(piece)
                n_tokens += len(ids)
                yield piece

    write_atomically(path, content())
    header: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.kind,
        "vocabulary_hash": tokenizer.vocabulary_hash,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "n_tokens": n_tokens,
        "n_bytes": n_bytes,
        "document_starts": starts,
        "sha256": sums.hexdigest(),
        "altered": altered(),
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
        header = _read_header(path.with_suffix(".json"))
        dtype = np.dtype(DTYPES[header["dtype"]]).newbyteorder("<")
        n_tokens = header["n_tokens"]
        _check_ids(path, header, dtype)
        # An empty file cannot be mapped.
        tokens = np.memmap(path, dtype, "r") if n_tokens else np.empty(0, dtype)
        starts = np.asarray(header["document_starts"], dtype=np.int64)
        if starts.ndim != 1 or (
            len(starts)
            and not (starts[0] == 0 and (np.diff(starts) >= 0).all() and starts[-1] <= n_tokens)
        ):
            raise ValueError("its document offsets are wrong")
        return TokenFile(
            tokens=tokens,
            document_starts=starts,
            n_bytes=header["n_bytes"],
            kind=header["tokenizer"],
            vocab_size=header["vocab_size"],
            vocabulary_hash=header["vocabulary_hash"],
            sha256=header["sha256"],
            # Older files are of tokenisers that restore every text.
            altered=bool(header.get("altered")),
        )
    except FileNotFoundError as error:
        raise MemspanError(f"{error.filename} is missing: {remedy}") from None
    # A damaged header may hold anything.
    except Exception as error:
        raise MemspanError(f"{path} is damaged ({error}): {remedy}") from None


def _read_header(path: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(read_limited(path, HEADER_LIMIT).decode())
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']!r}")
    if header.pop("header_sha256") != _check(header):
        raise ValueError("its header's checksum is wrong")
    for name in ("n_tokens", "n_bytes", "vocab_size"):
        if type(header[name]) is not int or header[name] < 0:
            raise ValueError(f"{name} {header[name]!r}")
    return header


def _check_ids(path: Path, header: dict[str, Any], dtype: np.dtype[Any]) -> None:
    n_tokens, size = header["n_tokens"], path.stat().st_size
    if size != n_tokens * dtype.itemsize:
        raise ValueError(f"{size:,} bytes instead of {n_tokens * dtype.itemsize:,}")
    if header["vocab_size"] > 256**dtype.itemsize:
        raise ValueError(f"a vocabulary of {header['vocab_size']:,} does not fit {dtype}")
    if not path.is_file():
        raise ValueError("it is not a regular file")
    # Read, not mapped: pages read through a map stay in memory.
    sums, largest = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            sums.update(piece)
            largest = max(largest, int(np.frombuffer(piece, dtype).max()))
    if sums.hexdigest() != header["sha256"]:
        raise ValueError("its checksum is wrong")
    if n_tokens and largest >= header["vocab_size"]:
        raise ValueError(f"token {largest:,} is beyond the vocabulary")


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
