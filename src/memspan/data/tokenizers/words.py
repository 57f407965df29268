"""Words as ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memspan.data.tokenizers.base import Tokenizer, utf8
from memspan.errors import MemspanError

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


class WordTokenizer(Tokenizer):
    """Words between white space, most frequent first; the end of a line is a word, as in WikiText.

    Others' vocabularies may lack ``<eos>``, so that lines have no end, or ``<unk>`` (or ``<UNK>``), so
    that unknown words are refused.

    Args:
        words: in the order of their ids.
        lower_case: read the text in lower case.
    """

    kind = "words"

    def __init__(self, words: list[str], lower_case: bool = False) -> None:
        # Refuses half of a surrogate pair, and what is not text.
        "".join(words).encode()
        self.words, self.lower_case = words, bool(lower_case)
        self._ids = {word: i for i, word in enumerate(words)}
        self.unknown = self._ids.get(UNKNOWN, self._ids.get(UNKNOWN.upper()))

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: bytes) -> np.ndarray:
        words = split_words(utf8(text).lower().encode() if self.lower_case else text)
        if END_OF_LINE not in self._ids:
            words = (word for word in words if word != END_OF_LINE)
        get, unknown = self._ids.get, self.unknown
        if unknown is None:
            return np.fromiter(map(self._known, words), dtype=self.dtype)
        return np.fromiter((get(word, unknown) for word in words), dtype=self.dtype)

    def _known(self, word: str) -> int:
        if word not in self._ids:
            raise MemspanError(
                f"{word[:60]!r} is not in the vocabulary, which has no {UNKNOWN} for it: give a text "
                "of its words only"
            )
        return self._ids[word]

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        words = (self.words[i] for i in ids)
        lines = " ".join("\n" if w == END_OF_LINE else w for w in words)
        return lines.replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n").encode()

    def content(self) -> dict[str, object]:
        # As in ByteTokenizer, left out at its default.
        return {"words": self.words} | ({"lower_case": True} if self.lower_case else {})


def split_words(text: bytes) -> Iterable[str]:
    """The words of each line, followed by the end of the line; the last line may have no end."""
    lines = utf8(text).split("\n")
    for n, line in enumerate(lines):
        yield from line.split()
        if n + 1 < len(lines):
            yield END_OF_LINE
