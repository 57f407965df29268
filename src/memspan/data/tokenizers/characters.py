"""Characters as ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from memspan.data.tokenizers.base import Tokenizer, decoded, utf8
from memspan.errors import MemspanError

NO_ID = (1 << 32) - 1
"""Marks what has no id in a table of ids."""


class CharacterTokenizer(Tokenizer):
    """The characters of the training text, sorted; id 0 is every other character.

    Args:
        characters: in the order of their ids.
        others: False, for others' vocabularies: ids begin with the first character's, and a text with
            any other is refused.
    """

    kind = "characters"

    def __init__(self, characters: str, others: bool = True) -> None:
        others = bool(others)
        # Refuses half of a surrogate pair.
        characters.encode()
        self.characters = characters
        codes = np.array([ord(c) for c in characters], dtype=np.int64)
        self.unknown = 0 if others else None
        self._ids = np.full(0x110000, 0 if others else NO_ID, dtype=np.uint32)
        self._ids[codes] = np.arange(others, len(codes) + others)

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + (self.unknown is not None)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(utf8(text).encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[codes]
        if self.unknown is None and (ids == NO_ID).any():
            other = chr(codes[(ids == NO_ID).argmax()])
            raise MemspanError(
                f"{other!r} is not in the vocabulary, which has no token for others: give a "
                "text of its characters only"
            )
        return ids.astype(self.dtype)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return (text.encode() for text in decoded(chunks))

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        table = "\N{REPLACEMENT CHARACTER}" * (self.unknown is not None) + self.characters
        return "".join(table[i] for i in ids).encode()

    def content(self) -> dict[str, object]:
        # As in ByteTokenizer, left out at its default.
        return {"characters": self.characters} | ({"others": False} if self.unknown is None else {})
