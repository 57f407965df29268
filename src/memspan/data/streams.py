"""Contiguous streams: row ``b`` of every segment continues row ``b`` of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memspan.errors import MemspanError

START = 0
"""The id that stands before a text's first token, so that the first token is scored too."""


@dataclass(frozen=True)
class Segment:
    """One step of training data."""

    inputs: Tensor
    """int64 ``[B, T]``."""
    targets: Tensor
    """int64 ``[B, T]``: the inputs' next tokens."""
    reset: Tensor | None
    """bool ``[B]``: rows that must forget before they read this segment; None: no row."""
    first: Tensor
    """int64 ``[B]``: where in the text each row's first input stands."""


class Streams:
    """Cuts a text into ``batch_size`` contiguous parts and reads them side by side, again and again.

    With ``document_starts`` a row is reset where a document starts inside its segment or at the
    segment's first token: boundaries act on whole segments, before the one that holds them.

    Raises:
        MemspanError: the text is too short for so many rows of such segments.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        segment_length: int,
        document_starts: np.ndarray | None = None,
    ) -> None:
        self.tokens, self.batch_size, self.segment_length = tokens, batch_size, segment_length
        _positive(batch_size, segment_length)
        if batch_size > len(tokens):
            raise MemspanError(
                f"{batch_size:,} rows are more than the text's {len(tokens):,} tokens: lower "
                "--train.batch-size, or give more text"
            )
        # The last token of a part is a target only, and each part's first has a predecessor.
        self.row_length = (len(tokens) - 1) // batch_size
        self.n_segments = self.row_length // segment_length
        if self.n_segments < 1:
            raise MemspanError(
                f"the text has {len(tokens):,} tokens, too few for {batch_size} rows of segments "
                f"of {segment_length}: lower --train.segment-length or --train.batch-size, or give "
                "more text"
            )
        self._starts = document_starts
        self.position = 0
        """Segments read."""
        self.offset = 0
        """Tokens of each row read since its start."""
        self.epoch = 0
        """How often the text has been read to its end."""
        self.tokens_read = 0
        """Tokens of each row read in all."""

    def set_segment_length(self, segment_length: int) -> None:
        """Go on from here in longer or shorter segments."""
        _positive(self.batch_size, segment_length)
        self.segment_length = segment_length
        self._wrap()

    def _wrap(self) -> None:
        """Start again where no whole segment is left."""
        if self.offset + self.segment_length > self.row_length:
            self.offset, self.epoch = 0, self.epoch + 1

    def next(self) -> Segment:
        """The next segment; after the last one the text starts again and every row is reset."""
        first = np.arange(self.batch_size) * self.row_length + self.offset
        index = first[:, None] + np.arange(self.segment_length + 1)
        block = torch.from_numpy(self.tokens[index].astype(np.int64))
        reset = None
        if self.offset == 0 and self.position > 0:
            reset = torch.ones(self.batch_size, dtype=torch.bool)
        elif self._starts is not None:
            low = np.searchsorted(self._starts, first)
            high = np.searchsorted(self._starts, first + self.segment_length)
            reset = torch.from_numpy(high > low)
        self.position += 1
        self.offset += self.segment_length
        self.tokens_read += self.segment_length
        self._wrap()
        return Segment(block[:, :-1], block[:, 1:], reset, torch.from_numpy(first))

    def state_dict(self) -> dict[str, int]:
        """The whole position: segments read, and what it is a position in."""
        return {
            "position": self.position,
            "offset": self.offset,
            "epoch": self.epoch,
            "tokens_read": self.tokens_read,
            "batch_size": self.batch_size,
            "segment_length": self.segment_length,
            "n_tokens": len(self.tokens),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position, with the segment length that it was saved with.

        Raises:
            MemspanError: it is a position in another text or for other rows, or no position.
        """
        mine = self.state_dict()
        # bool is an int to Python, but no count.
        whole = all(type(state.get(name)) is int for name in mine)
        counts = ("position", "offset", "epoch", "tokens_read")
        if not whole or min(state[name] for name in counts) < 0 or state["segment_length"] < 1:
            raise MemspanError(
                f"{state} is no stream position: resume from a checkpoint that is whole"
            )
        for name in ("batch_size", "n_tokens"):
            if state[name] != mine[name]:
                raise MemspanError(
                    f"the saved position is for {name} {state[name]:,}, not {mine[name]:,}: resume "
                    "with the same text and options"
                )
        if state["offset"] + state["segment_length"] > self.row_length:
            raise MemspanError(
                f"the saved position {state['offset']:,} is beyond the rows' {self.row_length:,} "
                "tokens: resume from a checkpoint that is whole"
            )
        self.position, self.offset = state["position"], state["offset"]
        self.epoch, self.tokens_read = state["epoch"], state["tokens_read"]
        self.segment_length = state["segment_length"]


def evaluation_segments(
    tokens: np.ndarray, batch_size: int, segment_length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Segments in which every token of the text is a target exactly once.

    The input before the text's first token is :data:`START`. Several rows are contiguous parts of
    the text; shorter rows are padded and masked.

    Returns:
        of each segment the inputs and targets, int64 ``[B, T]``, and a mask, bool ``[B, T]``, true
        where a target counts.

    Raises:
        MemspanError: no text, or not as much as a row or a segment needs.
    """
    _positive(batch_size, segment_length)
    if len(tokens) == 0:
        raise MemspanError("there is no text to score: give a split or file that has some")
    if batch_size > len(tokens):
        raise MemspanError(
            f"{batch_size:,} streams are more than the text's {len(tokens):,} tokens: lower "
            "--batch-size"
        )
    if segment_length > len(tokens):
        raise MemspanError(
            f"a segment of {segment_length:,} is longer than the text's {len(tokens):,} tokens: "
            "lower --segment-length"
        )
    return _segments(tokens, batch_size, segment_length)


def _segments(
    tokens: np.ndarray, batch_size: int, segment_length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    length = -(-len(tokens) // batch_size)
    rows = np.arange(batch_size)[:, None] * length
    for start in range(0, length, segment_length):
        column = np.arange(start, min(start + segment_length, length))
        index = rows + column
        mask = index < len(tokens)
        index = np.minimum(index, len(tokens) - 1)
        targets = tokens[index].astype(np.int64)
        inputs = np.where(index > 0, tokens[np.maximum(index - 1, 0)].astype(np.int64), START)
        yield torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(mask)


def _positive(batch_size: int, segment_length: int) -> None:
    if batch_size < 1 or segment_length < 1:
        raise MemspanError(
            f"batch size {batch_size} and segment length {segment_length} must be at least 1"
        )
