"""The laws of a model that carries state: each draws cases and says what must equal what.

All laws but ``cuts`` compare readings with the same cuts, so that each bug breaks its own law, and
models whose outputs depend on the cuts by design can be tested, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from statelaws.case import Case, Named, join, written
from statelaws.errors import NotOfferedError, RefusedError
from statelaws.protocol import Claims, Stateful
from statelaws.reading import LACKS, Reading

ROWS = 3
MANY_ROWS = 33
"""Rows of one case: some models take another path for many."""
LONG = 130
"""Tokens of a few cases of ``cuts``, beyond the lengths that others have: a chunk of 64 that no claim
names, a counter of eight bits."""


@dataclass
class Compared:
    """What must be equal, and what must differ for the case to show anything."""

    equal: list[tuple[Named, Named]]
    """Expected, seen."""
    unequal: list[tuple[Named, Named]] | None = None
    """What must differ (None: outputs from a wrong state, as for all laws)."""
    otherwise: str = ""
    """The message if it does not."""


Cases = Callable[[Claims, int], Iterable[Case]]
"""The cases for a model's claims and a seed."""
Compare = Callable[[Reading, Case], Compared]


@dataclass
class Law:
    """One law, which decorates the function that tries a case of it."""

    name: str
    says: str
    cases: Cases
    needs: tuple[str, ...] = ()
    """Functions of which a model must have one."""
    by_design: Callable[[Stateful[Any]], str | None] = lambda _: None
    """Why the law does not apply to a model that has them, if so."""
    reference: Callable[[Reading, Case], Tensor] | None = None
    """The computation whose floor is measured (None: the case's outputs)."""
    compare: Compare = field(init=False)

    def __call__(self, compare: Compare) -> Compare:
        self.compare = compare
        LAWS.append(self)
        return compare

    def missing(self, model: Stateful[Any]) -> str | None:
        """Why the law cannot be tried with a model, if so."""
        lacking = [LACKS[name] for name in self.needs if getattr(model, name, None) is None]
        if lacking and len(lacking) == len(self.needs):
            return ", and ".join(lacking)
        return self.by_design(model)


LAWS: list[Law] = []
"""In a report's order; ``bounded`` does not compare outputs, and is in ``statelaws.check``."""


def length_of(claims: Claims) -> int:
    """Tokens that cross every internal length twice; if they are few, on both sides of a cut."""
    longest = min(max(claims.lengths.values(), default=4), 256)
    tokens = max(24, (4 if longest <= 32 else 2) * longest + 5)
    return tokens if claims.cuts < 2 else max(tokens, 4 * claims.cuts + claims.cuts // 2)


def _cases(
    pieces: Callable[[int, int], list[tuple[int, ...]]], variants: Iterable[str] = ("",)
) -> Cases:
    """Every variant of ``pieces(half, rest)``, the two halves of the tokens."""

    def cases(claims: Claims, seed: int) -> list[Case]:
        tokens = length_of(claims)
        found = pieces(tokens // 2, tokens - tokens // 2)
        return [Case(ROWS, each, variant) for each in found for variant in variants]

    return cases


def _plain(half: int, rest: int) -> list[tuple[int, ...]]:
    """Two calls that make a state, and one that reads on: many tokens, and one."""
    return [(0, 1, 3), (half - 1, 1, 1), (half // 2, half - half // 2, rest)]


def _whole(reading: Reading, inputs: Named, pieces: Iterable[int]) -> Named:
    """All outputs of these pieces."""
    return join(reading.read_all(inputs, pieces)[0])


def _prefix(reading: Reading, pieces: Iterable[int], inputs: Named | None = None) -> Named:
    """The state after these pieces."""
    return reading.read_all(reading.x if inputs is None else inputs, pieces)[1]


def _kept(reading: Reading, pieces: Iterable[int]) -> Named:
    """The state after these pieces, to be used more than once."""
    outputs, state = reading.read_all(reading.x, pieces)
    return state if outputs else reading.given(state.value, state.text)


@Law(
    "repeatable",
    "the same call twice gives the same outputs",
    _cases(lambda half, rest: [(half + rest,), (half, rest), (half, 1, 1), (1,), (1, 2)]),
)
def _twice(reading: Reading, case: Case) -> Compared:
    first, second = (_whole(reading, reading.x, case.pieces) for _ in range(2))
    return Compared([(first, second)], [])


_EMPTY = "no tokens in between"


def _aligned(claims: Claims) -> list[tuple[int, ...]]:
    """Pieces with cuts at multiples of ``claims.cuts`` only."""
    n, tokens = claims.cuts, length_of(claims)
    cuts = [[2], [1], [3], [1, 2], [1, 2, 3], range(1, -(-tokens // n))]
    return [
        tuple(stop - start for start, stop in pairwise([0, *(n * i for i in each), tokens]))
        for each in cuts
    ]


def _cut_cases(claims: Claims, seed: int) -> Iterator[Case]:
    if not claims.anywhere:
        yield from (Case(ROWS, pieces) for pieces in _aligned(claims))
        return
    tokens = length_of(claims)
    half = tokens // 2
    yield Case(ROWS, (half, tokens - half))
    yield Case(ROWS, (1, tokens - 1))
    yield Case(ROWS, (tokens - 1, 1))
    yield Case(ROWS, (half, 1, 1, 2, tokens - half - 4))
    yield Case(ROWS, (1,) * tokens)
    sizes = {2, 3}
    for length in claims.lengths.values():
        sizes |= {length - 1, length, length + 1}
    for size in sorted(size for size in sizes if 1 < size < tokens):
        # Sixteen calls, if that is less than all, around the longest length.
        calls = min(tokens // size, 16)
        before = (tokens - calls * size) // 2 if calls == 16 else 0
        evenly = (before, *(size,) * calls, tokens - before - calls * size)
        yield Case(ROWS, tuple(filter(None, evenly)))
        if size != half:
            yield Case(ROWS, (size, tokens - size))
            rest = tokens - half - size
            yield Case(ROWS, (half, size, rest) if rest > 0 else (half, 1))
    generator = torch.Generator().manual_seed(seed)
    for most in (4, half):
        left, pieces = tokens, []
        while left:
            pieces.append(min(left, 1 + int(torch.randint(most, (), generator=generator))))
            left -= pieces[-1]
        yield Case(ROWS, tuple(pieces))
    for empty in ((half, tokens - half), (half, 1, 2)):
        yield Case(ROWS, empty, _EMPTY, extra=True)
    if tokens < LONG:
        for long in ((LONG // 2, LONG - LONG // 2), (LONG - 2, 1, 1), (1,) * LONG):
            yield Case(ROWS, long, extra=True)


@Law(
    "cuts",
    "outputs do not depend on where a text is cut",
    _cut_cases,
    by_design=lambda m: None if m.claims.cuts else "outputs depend on the cuts, by design",
)
def _cut(reading: Reading, case: Case) -> Compared:
    whole = _whole(reading, reading.x, [case.tokens])
    if case.variant != _EMPTY:
        return Compared([(whole, _whole(reading, reading.x, case.pieces))])
    outputs, state, at = [], reading.start(), 0
    for piece in filter(None, case.pieces):
        if at:
            # Few models promise to read nothing.
            _, state = reading.read(reading.x[:, at:at], state)
        output, state = reading.read(reading.x[:, at : at + piece], state)
        outputs.append(output)
        at += piece
    return Compared([(whole, join(outputs))])


@Law(
    "causality",
    "outputs do not depend on later inputs",
    _cases(
        lambda half, rest: [
            (0, half, rest),
            (0, 1, 3),
            (0, half + rest - 1, 1),
            (half, 1, rest - 1),
            (half, rest - 1, 1),
            (half, rest // 2, rest - rest // 2),
        ]
    ),
)
def _later(reading: Reading, case: Case) -> Compared:
    before, kept, changed = case.pieces
    x, other = reading.x, reading.other[: case.rows]
    inputs = join([x[:, : before + kept], other[:, before + kept :]])
    first, second = (
        reading.read_all(given, [before, kept + changed])[0][-1] for given in (x, inputs)
    )
    return Compared(
        [(first[:, :kept], second[:, :kept])],
        [(first[:, kept:], second[:, kept:])],
        "later inputs hardly change later outputs",
    )


_SELECTED: dict[str, Callable[[int], list[int]]] = {
    "select the rows in reverse": lambda rows: list(reversed(range(rows))),
    "select every row twice": lambda rows: [row for row in range(rows) for _ in range(2)],
    "select the last row": lambda rows: [rows - 1],
    "select all but the first row": lambda rows: list(range(1, rows)),
}
_NEIGHBOURS = ("each row alone", "rows in reverse", "other neighbours", "two rows more")
_FEW = "the first and the last rows alone"


def _rows_cases(claims: Claims, seed: int) -> Iterator[Case]:
    yield from _cases(_plain, (*_NEIGHBOURS, *_SELECTED))(claims, seed)
    for draw in (1, 2, 3):
        # A token may have a meaning of its own, such as the beginning of a text.
        half, rest = length_of(claims) // 2, length_of(claims) - length_of(claims) // 2
        yield Case(ROWS, (half // 2, half - half // 2, rest), _NEIGHBOURS[2], draw, extra=True)
    yield Case(MANY_ROWS, (2, 1, 3), _FEW, extra=True)


@Law("rows", "a row's outputs do not depend on other rows", _rows_cases)
def _rows(reading: Reading, case: Case) -> Compared:
    *before, last = case.pieces
    x, other = reading.x, reading.other
    if case.variant in _SELECTED:
        rows = _SELECTED[case.variant](case.rows)
        # Copies of a row read on differently.
        several = other if len(rows) <= len(other.value) else join([other, other], 0)
        tail = several[: len(rows), case.tokens - last :]
        expected, _ = reading.read(tail, _prefix(reading, before, x[rows]))
        selected = reading.state("select", _prefix(reading, before), torch.tensor(rows))
        return Compared([(expected, reading.read(tail, selected)[0])])
    expected = _whole(reading, x, case.pieces)
    most, every, back = case.rows - 1, slice(None), list(reversed(range(case.rows)))
    # What is read instead, and which rows of the expected outputs and of its own are the same.
    read: dict[str, list[tuple[Named, Any, Any]]] = {
        "each row alone": [(x[i : i + 1], slice(i, i + 1), every) for i in range(case.rows)],
        "rows in reverse": [(x[back], back, every)],
        "other neighbours": [
            (join([x[:1], other[1 : case.rows]], 0), slice(1), slice(1)),
            (join([other[:most], x[most:]], 0), slice(most, None), slice(most, None)),
        ],
        "two rows more": [(join([x, other[:2]], 0), every, slice(case.rows))],
        _FEW: [(x[:2], slice(2), every), (x[-2:], slice(-2, None), every)],
    }
    return Compared(
        [
            (expected[own], _whole(reading, inputs, case.pieces)[seen])
            for inputs, own, seen in read[case.variant]
        ]
    )


_VALUES = (
    "read the state twice",
    "read a copy, then the original",
    "read the original, then a copy",
    "outputs and inputs stay",
    "inputs are overwritten after the call",
)


@Law(
    "values",
    "reading leaves what was copied, or passed in, as it was",
    _cases(_plain, _VALUES),
)
def _values(reading: Reading, case: Case) -> Compared:
    *before, last = case.pieces
    start, consumed = sum(before), reading.model.claims.consumes_state
    tail, other = reading.x[:, start:], reading.other[: case.rows, start:]
    if case.variant == _VALUES[3]:
        outputs, state = reading.read_all(reading.x, before)
        if not outputs:
            return Compared([])
        output = outputs[-1]
        kept = reading.given(output.value.clone(), f"{output.text}.clone()", "kept")
        inputs = reading.given(tail.value.clone(), f"{tail.text}.clone()", "inputs")
        reading.read(inputs, state, own=False)
        now = reading.given(output.value, output.text, "now")
        after = reading.given(inputs.value, inputs.text, "now")
        return Compared([(kept, now), (tail, after)])
    if case.variant == _VALUES[0] and consumed:
        return Compared([])
    expected, _ = reading.read(tail, _prefix(reading, before))
    if case.variant == _VALUES[4]:
        state, at = reading.start(), 0
        for piece in filter(None, before):
            part, new = (each[:, at : at + piece] for each in (reading.x, reading.other))
            inputs = reading.given(part.value.clone(), f"{part.text}.clone()", "inputs")
            _, state = reading.read(inputs, state, own=False)
            # As a stream's buffer, which the next inputs come in.
            new = new[: case.rows]
            reading.lines.append(f"{inputs.text}.copy_({new.text})")
            inputs.value.copy_(new.value)
            at += piece
        return Compared([(expected, reading.read(tail, state)[0])])
    state = _kept(reading, before)
    copy = state if case.variant == _VALUES[0] else reading.state("copy", state)
    used, again = (copy, state) if case.variant == _VALUES[1] else (state, copy)
    # Many models take different paths for one token and for many.
    _, later = reading.read(other[:, :1], used)
    if last > 1:
        reading.read(other[:, 1:], later)
        if not consumed:
            reading.read(other, used)
    return Compared([(expected, reading.read(tail, again)[0])])


_RESET: dict[str, Callable[[int], list[bool]]] = {
    "reset the first row": lambda rows: [row == 0 for row in range(rows)],
    "reset the last row": lambda rows: [row == rows - 1 for row in range(rows)],
    "reset all but the first row": lambda rows: [row > 0 for row in range(rows)],
    "reset all rows": lambda rows: [True] * rows,
}
_PACKED = "documents in one call"


def _fresh_cases(claims: Claims, seed: int) -> Iterator[Case]:
    yield from _cases(_plain, _RESET)(claims, seed)
    packed = _cases(lambda half, rest: [(0, half, rest), (half, rest - 1, 1), (1, 3, 2)], [_PACKED])
    yield from packed(claims, seed)


@Law(
    "fresh-start",
    "a reset row and a packed document begin as from an empty state",
    _fresh_cases,
    ("reset", "read_packed"),
)
def _fresh(reading: Reading, case: Case) -> Compared:
    if case.variant == _PACKED:
        return _packed(reading, case)
    *before, _ = case.pieces
    tail = reading.x[:, sum(before) :]
    rows = _RESET[case.variant](case.rows)
    reset = reading.state("reset", _prefix(reading, before), torch.tensor(rows))
    seen, _ = reading.read(tail, reset)
    fresh, _ = reading.read(tail, reading.start())
    new, old = ([i for i, reset in enumerate(rows) if reset == each] for each in (True, False))
    pairs = [(fresh[new], seen[new])]
    if old:
        on, _ = reading.read(tail, _prefix(reading, before))
        pairs.append((on[old], seen[old]))
    return Compared(pairs)


def _packed(reading: Reading, case: Case) -> Compared:
    before, packed, after = case.pieces
    x, end = reading.x, before + packed
    if not packed:
        return Compared([])
    starts = torch.zeros(case.rows, packed, dtype=torch.bool)
    # In the middle; at the beginning and at the end; two, one after the other.
    at = [[packed // 2], [0, packed - 1], [packed // 3, packed // 3 + 1]]
    for row in range(case.rows):
        for position in at[row % len(at)]:
            starts[row, min(position, packed - 1)] = True
    state = _prefix(reading, [before])
    output, state = reading.outputs("read_packed", x[:, before:end], state, starts)
    last, _ = reading.read(x[:, end:], state)
    pairs = []
    for row in range(case.rows):
        edges = [0, *starts[row].nonzero().flatten().tolist(), packed]
        for first, stop in pairwise(edges):
            if first == stop:
                continue
            # Tokens before the first start belong to the previous call's document.
            prefix = 0 if starts[row, first] else before
            pieces = [prefix, stop - first, after if stop == packed else 0]
            inputs = x[:, before + first - prefix :]
            outputs, _ = reading.read_all(inputs, pieces)
            outputs = outputs[prefix > 0 :]
            pairs.append((outputs[0][row], output[row, first:stop]))
            if stop == packed and after:
                pairs.append((outputs[1][row], last[row]))
    return Compared(pairs)


def _padding_law(side: Literal["right", "left"]) -> None:
    def cases(claims: Claims, seed: int) -> Iterator[Case]:
        tokens = length_of(claims)
        half, rest = tokens // 2, tokens - tokens // 2
        for fill in ("zeros as padding", "other inputs as padding"):
            for pieces in ((0, half, rest), (0, 3, 1), (half, rest - 1, 1), (half, 3, 2)):
                if side == "right" or not pieces[0] or "left-continued" in claims.padding:
                    yield Case(ROWS, pieces, fill)
            # Some leave the mask out if there is one row.
            yield Case(1, (0, half, rest), fill)

    def by_design(model: Stateful[Any]) -> str | None:
        if {side, f"{side}-last"} & model.claims.padding:
            return None
        return f"it does not promise to ignore padding on the {side}"

    says = f"padding on the {side} changes nothing"

    @Law(f"padding-{side}", says, cases, ("read_padded",), by_design)
    def padded(reading: Reading, case: Case) -> Compared:
        before, padded, after = case.pieces
        x, end = reading.x, before + padded
        if not padded:
            return Compared([])
        # A full row, one of a single token, and one between: in one order sorting them by length
        # moves each to another's place, in the other from the longest to the shortest.
        several = [padded, 1, (padded + 1) // 2]
        several = several if case.variant.startswith("zeros") else several[::-1]
        lengths = torch.tensor(several * case.rows)[: case.rows]
        if case.rows == 1:
            lengths = torch.tensor([(padded + 1) // 2])
        position = torch.arange(padded).expand(case.rows, padded)
        position = position if side == "right" else position.flip(1)
        real = position < lengths[:, None]
        part, other = x[:, before:end], reading.other[: case.rows, before:end]
        mask = real.reshape(*real.shape, *[1] * (part.value.dim() - 2)).to(part.value.device)
        zeros = case.variant.startswith("zeros")
        fill = torch.zeros_like(other.value) if zeros else other.value
        text = f"torch.where({written(mask)}, {part.text}, {'0' if zeros else other.text})"
        inputs = reading.given(torch.where(mask, part.value, fill), text, "padded")
        state = _prefix(reading, [before])
        output, state = reading.outputs("read_padded", inputs, state, lengths, side)
        last, _ = reading.read(x[:, end:], state)
        pairs = []
        for row, length in enumerate(lengths.tolist()):
            first = before if side == "right" else end - length
            alone, state = reading.read(x[:, first : first + length], _prefix(reading, [before]))
            offset = first - before
            pairs.append((alone[row], output[row, offset : offset + length]))
            if after and (side == "left" or "right" in reading.model.claims.padding):
                pairs.append((reading.read(x[:, end:], state)[0][row], last[row]))
        return Compared(pairs)


_padding_law("right")
_padding_law("left")


def _back_cases(claims: Claims, seed: int) -> Iterator[Case]:
    tokens = length_of(claims)
    half, rest = tokens // 2, tokens - tokens // 2
    counts = {1, 2, half // 2, half}
    for length in claims.lengths.values():
        counts |= {n for n in (length - 1, length, length + 1) if 0 < n <= half}
    for n in sorted(counts):
        for variant in ("read in a call", "read token by token", "read with what is kept"):
            if claims.anywhere or variant == "read in a call":
                yield Case(ROWS, (half, n, rest), variant)
        # What is not overwritten at once must not be seen.
        yield Case(ROWS, (half, n, 1), "read in a call", extra=True)
    yield Case(ROWS, (1, 1, 2), "read in a call")


@Law("roll-back", "tokens rolled back were never read", _back_cases, ("truncate",))
def _back(reading: Reading, case: Case) -> Compared:
    kept, extra, _ = case.pieces
    if not kept or not extra:
        return Compared([])
    tail = reading.x[:, kept + extra :]
    calls = {"read in a call": [kept, extra], "read with what is kept": [kept + extra]}
    pieces = calls.get(case.variant, [kept, *[1] * extra])
    seen, _ = reading.read(tail, reading.state("truncate", _prefix(reading, pieces), extra))
    expected, _ = reading.read(tail, _prefix(reading, [kept]))
    return Compared([(expected, seen)])


@Law("files", "a state reads on the same from a file", _cases(_plain), ("save",))
def _files(reading: Reading, case: Case) -> Compared:
    *before, _ = case.pieces
    tail = reading.x[:, sum(before) :]
    expected, _ = reading.read(tail, _prefix(reading, before))
    state = _kept(reading, before)
    loaded = reading.saved(state)
    seen, _ = reading.read(tail, loaded)
    after, _ = reading.read(tail, state)
    return Compared([(expected, seen), (expected, after)])


def _weights(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.is_floating_point() and p.requires_grad]


def _slope(reading: Reading, outputs: Named) -> Named:
    """The gradient of a loss of ``outputs`` with respect to all weights."""
    value = outputs.value.flatten()
    if not value.requires_grad:
        raise RefusedError("its outputs carry no gradients")
    loss = value @ torch.linspace(-1, 1, len(value), dtype=value.dtype, device=value.device)
    slopes = torch.autograd.grad(loss, _weights(reading.model.module), materialize_grads=True)
    text = f"gradient({outputs.text})"
    return reading.given(torch.cat([s.flatten() for s in slopes]), text, "gradient")


GRADIENT = """\
def gradient(y):
    loss = y.flatten() @ torch.linspace(-1, 1, y.numel(), dtype=y.dtype)
    slopes = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
    return torch.cat([slope.flatten() for slope in slopes])"""


@torch.enable_grad()
def _whole_gradient(reading: Reading, case: Case) -> Tensor:
    whole = _whole(reading, reading.x, [case.tokens])
    return _slope(reading, whole[:, case.pieces[0] :]).value


def _no_gradients(model: Stateful[Any]) -> str | None:
    if not model.claims.carries_gradients:
        return "it detaches its state, by design"
    if not model.claims.cuts:
        return "outputs depend on where a text is cut, by design"
    return None if _weights(model.module) else "it has no weights that are trained"


def _gradient_cases(claims: Claims, seed: int) -> Iterator[Case]:
    if not claims.anywhere:
        yield from (Case(ROWS, pieces) for pieces in _aligned(claims)[:4])
        return
    tokens = length_of(claims)
    half, rest = tokens // 2, tokens - tokens // 2
    for pieces in (
        (half, rest),
        (half, 1, 1, 2),
        (1, 1, rest),
        (half // 2, half - half // 2, rest),
    ):
        yield Case(ROWS, pieces)


@Law(
    "gradients",
    "gradients flow through the state as through one long call",
    _gradient_cases,
    by_design=_no_gradients,
    reference=_whole_gradient,
)
def _gradients(reading: Reading, case: Case) -> Compared:
    reading.lines += GRADIENT.splitlines()
    first, *later = case.pieces
    whole = _whole(reading, reading.x, [case.tokens])[:, first:]
    outputs, _ = reading.read_all(reading.x, case.pieces)
    cut = join(outputs[first > 0 :])
    expected, seen = _slope(reading, whole), _slope(reading, cut)
    with torch.no_grad():
        state = _prefix(reading, [first])
    without = _slope(reading, join(reading.read_all(reading.x[:, first:], later, state)[0]))
    otherwise = "hardly any gradient flows through the state, even in one call"
    return Compared([(expected, seen)], [(expected, without)], otherwise)


_BETWEEN = ("other streams between", "training between", "gradients recorded")


@Law(
    "order-of-calls",
    "other calls in between change nothing",
    _cases(lambda half, rest: [(half, rest), (half, 1)], _BETWEEN),
)
def _order(reading: Reading, case: Case) -> Compared:
    expected = _whole(reading, reading.x, case.pieces)
    if case.variant == _BETWEEN[2]:
        reading.lines.append("torch.set_grad_enabled(True)")
        with torch.enable_grad():
            return Compared([(expected, _whole(reading, reading.x, case.pieces))])
    training, module = case.variant == _BETWEEN[1], reading.model.module
    if training and reading.model.claims.moves_in_training:
        raise NotOfferedError("training moves what it computes, by design")
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    state, outputs, at = _kept(reading, []), [], 0
    try:
        for piece in case.pieces:
            if training:
                module.train()
                reading.lines.append("module.train()")
            with torch.set_grad_enabled(training):
                _, other = reading.read(reading.other, reading.start(case.rows + 2))
                reading.read(reading.other[: case.rows], reading.start())
                reading.read(reading.other[:, :1], other)
            if training:
                module.eval()
                reading.lines.append("module.eval()")
            output, state = reading.read(reading.x[:, at : at + piece], state)
            outputs.append(output)
            at += piece
    finally:
        # Other cases are not to see what training moved.
        module.eval()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return Compared([(expected, join(outputs))])
