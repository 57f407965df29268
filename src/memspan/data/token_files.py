"""Token files: ids as a flat memory map, with a JSON header beside them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memspan.data.tokenizers import Tokenizer
from memspan.errors import MemspanError
from memspan.files import read_limited, write_atomically

FORMAT = "memspan-tokens-3"
HEADER_LIMIT = 1 << 28
"""Bytes of a header at most: some ten million documents."""
DTYPES = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}


@dataclass(frozen=True)
class TokenFile:
    """A tokenised text."""

    tokens: np.ndarray
    """Ids, 1-D, memory-mapped."""
    document_starts: np.ndarray
    """Index of every document's first token, int64."""
    n_bytes: int
    """Bytes of the text."""
    n_characters: int | None
    """Characters of the text, what is not UTF-8 replaced; None: not counted."""
    n_words: int | None
    """White-space separated words of the text; None: not counted."""
    kind: str
    """The tokeniser's."""
    vocab_size: int
    vocabulary_hash: str
    sha256: str
    """Of the ids."""


def write_tokens(
    path: Path,
    documents: list[np.ndarray],
    n_bytes: int,
    tokenizer: Tokenizer,
    *,
    n_characters: int | None = None,
    n_words: int | None = None,
) -> TokenFile:
    """Write ``path`` (``.bin``) and its header (``.json``).

    Args:
        path: the file of ids.
        documents: the ids of every document.
        n_bytes: bytes of the text that they stand for; likewise ``n_characters`` and ``n_words``.
        tokenizer: what made them.

    Raises:
        MemspanError: an id does not fit the vocabulary's type; a full disk.
    """
    dtype = tokenizer.dtype
    ids = np.concatenate([*documents, np.empty(0, dtype)])
    if len(ids) and int(ids.max()) > np.iinfo(dtype).max:
        raise MemspanError(
            f"token {int(ids.max()):,} is too large for {dtype}: prepare the corpus again with its "
            "own tokenizer"
        )
    content = ids.astype(dtype.newbyteorder("<")).tobytes()
    lengths = [len(d) for d in documents]
    starts = [0, *np.cumsum(lengths, dtype=np.int64)[:-1].tolist()] if lengths else []
    header: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.kind,
        "vocabulary_hash": tokenizer.vocabulary_hash,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.name,
        "n_tokens": len(ids),
        "n_bytes": n_bytes,
        "n_characters": n_characters,
        "n_words": n_words,
        "document_starts": starts,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomically(path, content)
    header["header_sha256"] = _check(header)
    write_atomically(path.with_suffix(".json"), json.dumps(header).encode())
    return read_tokens(path)


def read_tokens(path: Path) -> TokenFile:
    """Map a token file.

    Raises:
        MemspanError: it or its header is missing, truncated or altered.
    """
    remedy = "delete it and prepare the corpus again"
    try:
        text = read_limited(path.with_suffix(".json"), HEADER_LIMIT).decode()
        header: dict[str, Any] = json.loads(text)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        if header.pop("header_sha256") != _check(header):
            raise ValueError("its header's checksum is wrong")
        for name in ("n_tokens", "n_bytes", "vocab_size", "n_characters", "n_words"):
            optional = name in ("n_characters", "n_words") and header[name] is None
            if not optional and (type(header[name]) is not int or header[name] < 0):
                raise ValueError(f"{name} {header[name]!r}")
        dtype = np.dtype(DTYPES[header["dtype"]]).newbyteorder("<")
        n_tokens, size = header["n_tokens"], path.stat().st_size
        if size != n_tokens * dtype.itemsize:
            raise ValueError(f"{size:,} bytes instead of {n_tokens * dtype.itemsize:,}")
        if header["vocab_size"] > 256**dtype.itemsize:
            raise ValueError(f"a vocabulary of {header['vocab_size']:,} does not fit {dtype}")
        if not path.is_file():
            raise ValueError("it is no regular file")
        # An empty file cannot be mapped.
        tokens = np.memmap(path, dtype, "r") if n_tokens else np.empty(0, dtype)
        if hashlib.sha256(tokens.data).hexdigest() != header["sha256"]:
            raise ValueError("its checksum is wrong")
        if n_tokens and int(tokens.max()) >= header["vocab_size"]:
            raise ValueError(f"token {int(tokens.max()):,} is beyond the vocabulary")
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
            n_characters=header["n_characters"],
            n_words=header["n_words"],
            kind=header["tokenizer"],
            vocab_size=header["vocab_size"],
            vocabulary_hash=header["vocabulary_hash"],
            sha256=header["sha256"],
        )
    except FileNotFoundError as error:
        raise MemspanError(f"{error.filename} is missing: {remedy}") from None
    # The last two: JSON that is nested too deep, a count that is infinite.
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise MemspanError(f"{path} is damaged ({error}): {remedy}") from None


def _check(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
