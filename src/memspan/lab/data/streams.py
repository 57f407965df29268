"""Contiguous streams: row ``b`` of every segment continues row ``b`` of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from memspan.errors import MemspanError, counted
from memspan.nn import NOT_SCORED

START = 0
"""The input before a text's or a document's first token, so that the first token is scored too."""
POSITION = ("position", "offset", "epoch", "tokens_read", "segment_length")
"""A saved position in :class:`Streams`."""


@dataclass(frozen=True)
class Segment:
    """Tokens to read and to predict."""

    inputs: Tensor
    """int64 ``[B, T]``: each target's predecessor; :data:`START` before a document's first token."""
    targets: Tensor
    """int64 ``[B, T]``; :data:`~memspan.nn.NOT_SCORED` beyond the end of a row."""
    starts: Tensor | None
    """bool ``[B, T]``: where a document begins, or the text starts again; None: nowhere."""
    first: Tensor
    """int64 ``[B]``: position in the text of each row's first input."""

    def part(self, rows: slice, device: torch.device) -> Segment:
        """The rows of one process, on its device."""
        starts = None if self.starts is None else self.starts[rows].to(device)
        return Segment(
            self.inputs[rows].to(device), self.targets[rows].to(device), starts, self.first[rows]
        )


def segment_at(
    tokens: np.ndarray, first: np.ndarray, n: int, document_starts: np.ndarray | None
) -> Segment:
    """The segment whose targets are, in each row, the ``n`` tokens from position ``first [B]`` on."""
    index = first[:, None] + np.arange(-1, n)
    block = tokens[np.clip(index, 0, len(tokens) - 1)].astype(np.int64)
    index = index[:, 1:]
    inside = index < len(tokens)
    begins = index == 0
    if document_starts is not None and len(document_starts):
        nearest = np.searchsorted(document_starts, index).clip(max=len(document_starts) - 1)
        begins |= inside & (document_starts[nearest] == index)
    marked = document_starts is not None and begins.any()
    return Segment(
        inputs=torch.from_numpy(np.where(begins, START, block[:, :-1])),
        targets=torch.from_numpy(np.where(inside, block[:, 1:], NOT_SCORED)),
        starts=torch.from_numpy(begins) if marked else None,
        first=torch.from_numpy(np.maximum(first - 1, 0)),
    )


class Streams:
    """Cuts a text into ``batch_size`` contiguous rows and reads them in parallel, over and over.

    With ``document_starts`` (the index of each document's first token) a document ``x0 .. xn`` is
    read as ``START, x0 .. x(n-1)``, and ``starts`` marks its beginning. Without, the text's first
    token is only an input.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        segment_length: int,
        document_starts: np.ndarray | None = None,
    ) -> None:
        self.tokens = tokens
        self.batch_size = batch_size
        self.segment_length = segment_length
        self._starts = document_starts
        self._skipped = 1 if document_starts is None else 0
        # Counted in targets.
        self.row_length = (len(tokens) - self._skipped) // batch_size
        self.n_segments = self.row_length // segment_length
        if self.n_segments < 1:
            raise MemspanError(
                f"the text has {counted(len(tokens), 'token')}, too few for "
                f"{counted(batch_size, 'row')} of segments of {segment_length}: lower "
                "--train.segment-length or --train.batch-size, or give more text"
            )
        self.position = 0
        """Segments read."""
        self.offset = 0
        """Tokens of each row read since its start."""
        self.epoch = 0
        """Times the text has been read to its end."""
        self.tokens_read = 0
        """Tokens of each row read in total."""

    def set_segment_length(self, segment_length: int) -> None:
        """Continue from here with longer or shorter segments."""
        self.segment_length = segment_length
        self._wrap()

    def _wrap(self) -> None:
        """Start the text again if less than a segment is left."""
        if self.offset + self.segment_length > self.row_length:
            self.offset = 0
            self.epoch += 1

    def next(self) -> Segment:
        """The next segment; after the last one, every row starts again."""
        first = np.arange(self.batch_size) * self.row_length + self.offset + self._skipped
        segment = segment_at(self.tokens, first, self.segment_length, self._starts)
        if self.offset == 0 and self.position > 0:
            starts = segment.starts
            if starts is None:
                starts = torch.zeros_like(segment.inputs, dtype=torch.bool)
            starts[:, 0] = True
            segment = replace(segment, starts=starts)
        self.position += 1
        self.offset += self.segment_length
        self.tokens_read += self.segment_length
        self._wrap()
        return segment

    def state_dict(self) -> dict[str, int]:
        """The position, and the sizes for which it is valid, as plain integers."""
        kept = {name: getattr(self, name) for name in (*POSITION, "batch_size")}
        return kept | {"n_tokens": len(self.tokens)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position, with its segment length.

        Raises:
            MemspanError: it belongs to another text or batch size, or is not a position.
        """
        mine = self.state_dict()
        # Not isinstance: bool is an int.
        whole = all(type(state.get(name)) is int and state[name] >= 0 for name in mine)
        for name in ("batch_size", "n_tokens"):
            if whole and state[name] != mine[name]:
                raise MemspanError(
                    f"the saved position is for {name} {state[name]:,}, not {mine[name]:,}: resume "
                    "with the same text and options"
                )
        if not whole or not 0 < state["segment_length"] <= self.row_length - state["offset"]:
            raise MemspanError(
                f"{state} is not a stream position: resume from a checkpoint that is whole"
            )
        for name in POSITION:
            setattr(self, name, state[name])


def evaluation_segments(
    tokens: np.ndarray,
    batch_size: int,
    segment_length: int,
    document_starts: np.ndarray | None = None,
) -> Iterator[Segment]:
    """Segments in which every token of the text is a target exactly once.

    The input before the text's first token is :data:`START`; with ``document_starts`` (see
    :class:`Streams`) so is the input before each document's. Rows are contiguous parts of the text;
    shorter ones end with targets that are not scored.
    """
    if batch_size < 1 or segment_length < 1:
        raise MemspanError(
            f"batch size {batch_size} and segment length {segment_length} must be at least 1"
        )
    if len(tokens) == 0:
        raise MemspanError("there is no text to score: give a split or file that has some")
    if batch_size > len(tokens):
        raise MemspanError(
            f"{batch_size:,} streams are more than the text's {counted(len(tokens), 'token')}: lower "
            "--batch-size"
        )
    if segment_length > len(tokens):
        raise MemspanError(
            f"a segment of {segment_length:,} is longer than the text's "
            f"{counted(len(tokens), 'token')}: lower --segment-length"
        )
    length = -(-len(tokens) // batch_size)
    rows = np.arange(batch_size) * length
    return (
        segment_at(tokens, rows + at, min(segment_length, length - at), document_starts)
        for at in range(0, length, segment_length)
    )
