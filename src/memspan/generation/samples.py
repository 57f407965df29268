"""A text as it is written."""

from __future__ import annotations

from collections.abc import Sequence

from memspan.data.tokenizers.base import StreamDecoder


class Sample:
    """One continuation: its tokens, and its text up to a stop string."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.text = ""
        """As far as it is certain: without what may yet become a stop string."""
        self.stopped = False
        self._decoder, self._stop, self._held = decoder, stop, ""

    def push(self, token: int, last: bool = False) -> str:
        """Add a token, unless the sample has stopped. The text that became certain; with the ``last``
        token all of it is."""
        if self.stopped:
            return ""
        self.tokens.append(token)
        piece = self._decoder.push(token)
        if self._stop:
            piece = self._certain(self._held + piece, last)
        self.text += piece
        return piece

    def _certain(self, text: str, last: bool) -> str:
        """The part of ``text`` before a stop string, or before what may become one."""
        n = len(text)
        if ends := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.stopped, n = True, min(ends)
        elif not last:
            n -= max(_overlap(text, stop) for stop in self._stop)
        self._held = text[n:]
        return text[:n]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
