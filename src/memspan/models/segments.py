"""Documents and padding inside a segment: what the architectures share.

``starts`` (bool ``[B, T]``) marks the first token of each document: that token and the later ones
of its row see nothing before it. ``lengths`` (int64 ``[B]``) counts a row's tokens; the rest of its
segment is padding, on the right or on the left. A row with padding reads exactly as it does alone.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.output import BackboneOutput
from memspan.nn import without_padding

M = TypeVar("M", bound=Memory)
Padding = Literal["right", "left"]


def move_left(x: Tensor, lengths: Tensor) -> Tensor:
    """Turn left padding into right padding, ``[B, T, ...] -> [B, T, ...]``, by rotating each row."""
    return _rotate(x, x.shape[1] - lengths)


def move_right(x: Tensor, lengths: Tensor) -> Tensor:
    """Turn right padding into left padding: the inverse of :func:`move_left`."""
    return _rotate(x, lengths)


def _rotate(x: Tensor, by: Tensor) -> Tensor:
    """Every row begins with its column ``by [B]``."""
    columns = torch.arange(x.shape[1], device=x.device) + by[:, None]
    columns = columns % max(x.shape[1], 1)
    return x.gather(1, columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand_as(x))


def padding_mask(lengths: Tensor, n_tokens: int, padding: Padding = "right") -> Tensor:
    """Bool ``[B, T]``, true at a row's own tokens."""
    columns = torch.arange(n_tokens, device=lengths.device)
    if padding == "right":
        return columns < lengths[:, None]
    return columns >= n_tokens - lengths[:, None]


@dataclass(frozen=True)
class Documents:
    """The documents of a segment whose padding is on the right, for architectures that mask attention.

    Padding counts as one more document: nothing else sees it, and it sees nothing else.
    """

    begins: Tensor | None
    """Bool ``[B, T]``: the first token of each document (None: none begins)."""
    number: Tensor
    """int64 ``[B, T]``: the document a column belongs to; 0 is the one that memory belongs to."""
    fresh: Tensor
    """Bool ``[B]``: whether a document starts in the segment, so that memory before it is forgotten."""
    lengths: Tensor
    """Tokens of each row, int64 ``[B]``."""
    n_last: Tensor
    """Tokens of each row's last document in the segment, int64 ``[B]``."""

    moved: bool
    """True if padding was on the left, see :func:`documents_of`."""

    def unless_fresh(self, counts: Tensor) -> Tensor:
        """``counts [B]`` of what was there before the segment: 0 where it is forgotten."""
        return counts.where(~self.fresh, 0)

    def first_columns(self, before: int) -> Tensor:
        """The column in which each token's document begins, int64 ``[B, T]``; ``before`` for those of
        the document that memory belongs to."""
        earlier = F.pad(self.number[:, :-1], (1, 0))
        column = torch.arange(self.number.shape[1], device=self.number.device)
        first = torch.where(self.number == earlier, 0, column).cummax(1).values
        return first.masked_fill(self.number == 0, before)

    def own(self) -> Tensor:
        """Bool ``[B, T]``: true at a row's tokens, false at its padding."""
        return padding_mask(self.lengths, self.number.shape[1])

    def tokens_before(self, seen: Tensor) -> Tensor:
        """Count the tokens of its document before each token, int64 ``[B, T]``, where a row had
        read ``seen [B]`` tokens before the segment."""
        column = torch.arange(self.number.shape[1], device=seen.device)
        if self.begins is None:
            return seen[:, None] + column
        first = (self.begins * column).cummax(1).values
        return column - first + seen[:, None].where(self.number == 0, 0)

    def put_back(self, x: Tensor) -> Tensor:
        """Outputs ``[B, T, D]`` with the padding on the side that it came on."""
        return move_right(x, self.lengths) if self.moved else x

    def last(self) -> Tensor:
        """Bool ``[B, T]``: the columns of each row's last document."""
        column = torch.arange(self.number.shape[1], device=self.lengths.device)
        first = self.lengths - self.n_last
        return (column >= first[:, None]) & (column < self.lengths[:, None])

    def newest(self, x: Tensor, count: int) -> Tensor:
        """The last ``count`` columns of ``x [B, S, D]``, memory and segment, before the padding."""
        end = x.shape[1] - self.number.shape[1] + self.lengths
        columns = end[:, None] + torch.arange(-count, 0, device=x.device)
        return x.gather(1, columns[..., None].expand(-1, -1, x.shape[2]))


def documents_of(
    x: Tensor, starts: Tensor | None, lengths: Tensor | None = None, padding: Padding = "right"
) -> tuple[Tensor, Documents | None]:
    """The documents of ``x [B, T, D]``, and ``x`` with its padding on the right and zero.

    None where neither documents start nor rows are padded.
    """
    rows, n_tokens = x.shape[:2]
    if not n_tokens or (starts is None and lengths is None):
        return x, None
    moved = lengths is not None and padding == "left"
    if lengths is None:
        lengths = torch.full((rows,), n_tokens, device=x.device)
    if moved:
        x = move_left(x, lengths)
        starts = None if starts is None else move_left(starts, lengths)
    column = torch.arange(n_tokens, device=x.device)
    own = column < lengths[:, None]
    x = without_padding(x, own)
    begins = torch.zeros_like(own) if starts is None else starts & own
    number = (begins | (column == lengths[:, None])).cumsum(1)
    last_start = (begins * column).amax(1)
    marked = None if starts is None else begins
    return x, Documents(marked, number, begins.any(1), lengths, lengths - last_start, moved)


def read_whole(
    read: Callable[..., BackboneOutput[M]],
    x: Tensor,
    memory: M,
    starts: Tensor | None,
    lengths: Tensor | None,
    padding: Padding = "right",
) -> BackboneOutput[M]:
    """Read a segment by a ``read`` that knows documents: ``x [B, T, D]`` with its padding on the right,
    a memory and ``documents`` in. Other arguments: see :meth:`memspan.models.Backbone.forward`.

    Sizes do not depend on where documents begin, so that this is one graph of ``torch.compile``.
    """
    if not x.numel():
        return BackboneOutput(x, memory, x.new_zeros(()))
    x, documents = documents_of(x, starts, lengths, padding)
    output = read(x, memory, documents=documents)
    if documents is None:
        return output
    return replace(output, hidden=documents.put_back(output.hidden))


def read_by_length(
    read: Callable[..., BackboneOutput[M]],
    x: Tensor,
    memory: M,
    starts: Tensor | None,
    lengths: Tensor | None,
    padding: Padding,
    longest: int,
) -> BackboneOutput[M]:
    """Read a segment ``x [B, T, D]`` as several of at most ``longest`` tokens, by a backbone's pass
    ``read``, whose results do not depend on the cuts. It has no auxiliary loss.

    Attention to the last M positions then takes T (M + longest) products in place of T^2. Other
    arguments: see :meth:`memspan.models.Backbone.forward`.
    """
    moved = lengths if padding == "left" else None
    if moved is not None:
        x = move_left(x, moved)
        starts = None if starts is None else move_left(starts, moved)
    hidden = []
    for start in range(0, x.shape[1], longest):
        piece = x[:, start : start + longest]
        output = read(
            piece,
            memory,
            starts=None if starts is None else starts[:, start : start + longest],
            lengths=None if lengths is None else (lengths - start).clamp(0, piece.shape[1]),
        )
        memory = output.memory
        hidden.append(output.hidden)
    whole = torch.cat(hidden, 1)
    whole = whole if moved is None else move_right(whole, moved)
    return BackboneOutput(whole, memory, output.auxiliary_loss)


def read_in_pieces(
    read: Callable[[Tensor, M], BackboneOutput[M]],
    x: Tensor,
    memory: M,
    starts: Tensor | None,
    lengths: Tensor | None,
    padding: Padding = "right",
) -> BackboneOutput[M]:
    """Read a segment with documents and padding by a ``read`` that knows neither: ``x [B, t, D]`` and a
    memory in, the output for them out. Other arguments: see :meth:`memspan.models.Backbone.forward`.

    For architectures whose results do not depend on how a text is cut. Each row's documents are read as
    rows of their own, those of about one length together: a document of 13 tokens in calls for 8, 4 and
    1 of its tokens, or in one for all 13 where there are few lengths. So ``read`` is called with other
    numbers of rows than ``x`` has, and no token is read that is not there. The documents are found on
    the CPU, which waits for the device once.

    Raises:
        MemspanError: this is exported with ``starts`` or ``lengths``.
    """
    if not x.numel():
        return BackboneOutput(x, memory, x.new_zeros(()))
    if starts is None and lengths is None:
        return read(x, memory)
    if torch.compiler.is_exporting():
        raise MemspanError(
            "an exported graph of this architecture cannot take starts or lengths: it reads each "
            "document as a row of its own, and how many there are is not known then; export it without"
        )
    rows, n_tokens = x.shape[:2]
    begins = x.new_zeros(rows, n_tokens, dtype=torch.bool) if starts is None else starts
    real = torch.ones_like(begins)
    if lengths is not None:
        real = padding_mask(lengths, n_tokens, padding)
        x = without_padding(x, real)
    pieces = _pieces((begins & real).cpu(), real.cpu())
    if not pieces:
        return replace(read(x, memory), memory=memory)
    outputs = []
    places = []
    unread = sorted({*range(rows)} - {piece.row for piece in pieces})
    # Rows that have been read, and their memories.
    ends = [(unread, memory.select(unread))]
    # The memory of each piece.
    memories = memory.select([piece.row for piece in pieces])
    memories = memories.reset([piece.begins for piece in pieces])
    for size in _sizes([piece.length for piece in pieces]):
        now = [n for n, piece in enumerate(pieces) if piece.length >= size]
        later = [n for n, piece in enumerate(pieces) if piece.length < size]
        columns = torch.tensor([pieces[n].first for n in now])[:, None] + torch.arange(size)
        places.append(columns.flatten().to(x.device))
        part = x.flatten(0, 1).index_select(0, places[-1]).unflatten(0, columns.shape)
        output = read(part, memories.select(now))
        outputs.append(output)
        memories = _joined([output.memory, memories.select(later)])
        pieces = [pieces[n].after(size) for n in now] + [pieces[n] for n in later]
        last = [n for n, piece in enumerate(pieces) if piece.is_last and not piece.length]
        ends.append(([pieces[n].row for n in last], memories.select(last)))
        left = [n for n, piece in enumerate(pieces) if piece.length]
        pieces = [pieces[n] for n in left]
        memories = memories.select(left)
    found = torch.cat([output.hidden.flatten(0, 1) for output in outputs])
    hidden = found.new_zeros(rows * n_tokens, found.shape[1])
    hidden = hidden.index_copy(0, torch.cat(places), found)
    order = torch.tensor([row for rows_read, _ in ends for row in rows_read]).argsort()
    return BackboneOutput(
        hidden.unflatten(0, (rows, n_tokens)),
        _joined([memory for _, memory in ends]).select(order.to(x.device)),
        torch.stack([output.auxiliary_loss for output in outputs]).sum(),
        outputs[-1].statistics,
    )


class _Piece(NamedTuple):
    """The tokens of one document in a row, as far as they have not been read."""

    row: int
    first: int
    """Its place among all tokens of all rows."""
    length: int
    begins: bool
    """True if the document begins here; else it goes on from the row's memory."""
    is_last: bool
    """True if no other follows in the row."""

    def after(self, size: int) -> _Piece:
        """The rest of this piece once ``size`` more tokens have been read."""
        return self._replace(first=self.first + size, length=self.length - size)


def _pieces(begins: Tensor, real: Tensor) -> list[_Piece]:
    """Pieces of all rows. ``begins``, bool ``[B, T]``, marks the first tokens of documents, ``real``
    all that is not padding."""
    n_tokens = real.shape[1]
    found = []
    for row, (starts, own) in enumerate(zip(begins, real, strict=True)):
        columns = own.nonzero().flatten().tolist()
        if not columns:
            continue
        marked = set(starts.nonzero().flatten().tolist())
        edges = sorted({columns[0], *marked, columns[-1] + 1})
        for start, end in pairwise(edges):
            is_last = end == edges[-1]
            place = row * n_tokens + start
            found.append(_Piece(row, place, end - start, start in marked, is_last))
    return found


def _sizes(lengths: list[int]) -> list[int]:
    """Numbers of tokens to read at a time of all pieces that have as many left, until none has any.

    The differences between the lengths, or where those are too many, powers of two.
    """
    differences = [b - a for a, b in pairwise([0, *sorted(set(lengths))])]
    bits = functools.reduce(operator.or_, lengths)
    powers = [1 << n for n in reversed(range(bits.bit_length())) if bits >> n & 1]
    return min(differences, powers, key=len)


def _joined(memories: list[M]) -> M:
    """Their rows, one after the other."""
    fields = [memory.tensors() for memory in memories]
    return replace(
        memories[0], **{name: torch.cat([each[name] for each in fields]) for name in fields[0]}
    )
