"""Bytes as ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from memspan.data.tokenizers.base import Tokenizer
from memspan.errors import MemspanError


class ByteTokenizer(Tokenizer):
    """Ids are the bytes.

    Args:
        values: the bytes with an id, in the order of their ids, for others' vocabularies (None: all, by
            value). Without the line break among them, lines have no end; a text with any other byte is
            refused.
    """

    kind = "bytes"

    def __init__(self, values: list[int] | None = None) -> None:
        self.values = values
        self._values = np.array(range(256) if values is None else values, dtype=np.uint8)
        self._ids = np.full(256, -1, dtype=np.int16)
        self._ids[self._values] = np.arange(len(self._values))

    @property
    def vocab_size(self) -> int:
        return len(self._values)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(text, dtype=np.uint8)
        if self.values is None:
            return codes
        if self._ids[ord("\n")] < 0:
            codes = codes[codes != ord("\n")]
        ids = self._ids[codes]
        if (ids < 0).any():
            raise MemspanError(
                f"the byte {codes[(ids < 0).argmax()]} is not in the vocabulary, which has no token "
                "for other bytes: give a text of its bytes only"
            )
        return ids.astype(self.dtype)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return iter(chunks)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        if isinstance(ids, np.ndarray):
            # This may be a whole split: not byte by byte.
            codes = ids.astype(np.uint8)
        else:
            codes = np.fromiter(ids, dtype=np.uint8)
        return (codes if self.values is None else self._values[codes]).tobytes()

    def content(self) -> dict[str, object]:
        # Left out at its default, so that files and checksums of older versions stay the same.
        return {} if self.values is None else {"values": self.values}
