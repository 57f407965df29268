"""Examines one model: tries a law's cases, judges their differences, and makes a broken one smaller."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statelaws.case import Case, Named, join
from statelaws.effect import without_effect
from statelaws.errors import NotOfferedError
from statelaws.floor import (
    CLOSE,
    FACTOR,
    IdleBits,
    Reference,
    difference,
    exact,
    idle_bits,
    reference,
)
from statelaws.laws import COMPARING
from statelaws.laws.bounded import BOUNDED, EARLY, KEEPS, SIZES, growth
from statelaws.laws.cuts import cuts
from statelaws.laws.gradients import gradients
from statelaws.laws.law import ROWS, Compared, Law, length_of
from statelaws.laws.order_of_calls import order_of_calls
from statelaws.laws.repeatable import repeatable
from statelaws.protocol import Stateful
from statelaws.reading import Reading, called
from statelaws.report import Finding, Outcome, said
from statelaws.script import script

SHRINKING = 2.0
"""Seconds to search for the smallest case that breaks a law."""
FRESH_BYTES = 1 << 26
"""The largest weights of which a copy is kept, to repeat on it what was found."""
CONFIRMING = (4, 5, 6)
"""Draws of inputs with which something is seen again."""
ONE_OLD = "a state one token old"


@dataclass
class _Judged:
    """The result of one case."""

    difference: float
    reference: Reference
    weakness: str = ""
    """Why the case shows nothing, if so."""
    reading: Reading | None = None
    pair: tuple[Named, Named] | None = None
    """The expected and actual values that differ most."""

    @property
    def broken(self) -> bool:
        return self.difference > self.reference.threshold

    @property
    def floors(self) -> float:
        """The difference in floors."""
        floor = self.reference.floor
        return self.difference / floor if floor > 0 else 0.0


class Bench:
    def __init__(self, model: Stateful[Any], seed: int, budget: float, folder: Path) -> None:
        self.model = model
        self.seed = seed
        self.deadline = time.process_time() + budget
        self.extra_until = time.process_time() + budget / 3
        """When no more cases are begun that are extra."""
        self.folder = folder
        self.repeatable = True
        self.tried = True
        self.claims = model.claims
        self.dtype = "unknown"
        self.idle_bits: IdleBits = {}
        self._references: dict[tuple[Any, ...], Reference] = {}
        self._powers: dict[tuple[int, ...], str] = {}
        self._unread = _copied(model)
        """The model as it came, which has read nothing (None: it cannot be copied)."""
        self._first: tuple[Case, Tensor] | None = None
        """The first reading of all."""
        self._past: list[str] = []
        """Report a difference seen after other calls, and not in a model that had read nothing."""

    def findings(self, names: list[str]) -> tuple[Finding, ...]:
        error = self._fit()
        if error is None and (no_effect := without_effect(self.model, length_of(self.claims))):
            error = str(no_effect)
        if error:
            self.tried = False
            return tuple(Finding(name, "refused", error) for name in names)
        found = {}
        # The first decides whether others can be tried; the second wants a model that has read little.
        for law in (repeatable, order_of_calls, *COMPARING[1:-1]):
            if law.name in names or law is repeatable:
                found[law.name] = self._examine(law)
            if law is repeatable:
                self.repeatable = found[law.name].outcome != "broken"
        last = order_of_calls.name
        if last in names and self.repeatable and found[last].outcome != "broken":
            found[last] = self._first_and_last() or found[last]
        if BOUNDED in names:
            found[BOUNDED] = self._bounded()
        return tuple(found[name] for name in names)

    def _fit(self) -> str | None:
        """Drop the longest lengths while the model refuses that many tokens; return why none fits."""
        while True:
            tokens = length_of(self.claims)
            n = max(self.claims.cuts, tokens // 2)
            pieces = (tokens,) if self.claims.anywhere else (n, tokens - n)
            try:
                outputs = self._outputs(Case(ROWS, pieces))
                if outputs.shape[:2] != (ROWS, tokens):
                    return (
                        f"it returns outputs {list(outputs.shape)} for {ROWS} rows of {tokens} inputs, "
                        "and one for each input is needed"
                    )
                self._first = Case(ROWS, pieces), outputs.clone()
                self.dtype = str(outputs.dtype).removeprefix("torch.")
                compute = functools.partial(self._outputs, Case(ROWS, pieces))
                self.idle_bits = idle_bits(compute, self.model.module, self.seed)
                return None
            except Exception as error:
                if not self.claims.lengths:
                    return said(error)
                longest = max(self.claims.lengths.values())
                lengths = {k: n for k, n in self.claims.lengths.items() if n < longest}
                self.claims = replace(self.claims, lengths=lengths)

    def _reading(self, case: Case) -> Reading:
        return Reading(self.model, case, self.seed, self.folder)

    @torch.no_grad()
    def _outputs(self, case: Case) -> Tensor:
        reading = self._reading(case)
        return join(reading.read_all(reading.x, case.pieces)[0]).value

    def _examine(self, law: Law) -> Finding:
        if missing := law.missing(self.model):
            return Finding(law.name, "not-offered", missing)
        if not self.repeatable and law is not order_of_calls:
            return Finding(law.name, "inconclusive", "the same call twice gives other outputs")
        worst: _Judged | None = None
        closest = 0.0
        weak: list[str] = []
        # Where numbers are coarse, many cases show nothing, and it takes one that does.
        strong = False
        problems: dict[Outcome, str] = {}
        for case in law.cases(self.claims, self.seed):
            if case.extra and time.process_time() > self.extra_until:
                continue
            if time.process_time() > self.deadline:
                problems.setdefault("inconclusive", "not all was reached in the time")
                break
            try:
                judged = self._judge(law, case)
            except NotOfferedError as error:
                if case.extra:
                    continue
                problems.setdefault("not-offered", said(error))
                continue
            except Exception as error:
                if case.extra:
                    continue
                problems.setdefault("refused", f"{said(error)} ({case})")
                continue
            if judged.broken and judged.reference.coarse and not self._confirmed(law, case):
                continue
            if judged.broken:
                if (finding := self._shrunk(law, case, judged)).outcome == "broken":
                    return finding
                problems.setdefault("inconclusive", finding.detail)
                continue
            if judged.weakness:
                if not case.extra:
                    weak.append(f"{judged.weakness} ({case})")
            elif judged.reference.coarse:
                strong = True
            floors = judged.floors
            if (
                not judged.reference.coarse
                and floors > max(closest, CLOSE)
                and law not in (repeatable, gradients)
            ):
                closest = floors
                problems.setdefault(
                    "inconclusive",
                    f"off by more than {CLOSE} floors and less than the {FACTOR} that break a law"
                    f"{'' if self.dtype == 'float64' else ': try float64'} ({case})",
                )
            if worst is None or judged.difference > worst.difference:
                worst = judged
        if weak and not strong:
            problems.setdefault("inconclusive", weak[0])
        fallback: Outcome = "not-offered" if worst is None else "holds"
        outcomes: tuple[Outcome, ...] = ("refused", "inconclusive")
        outcome = next((each for each in outcomes if each in problems), fallback)
        detail = problems.get(outcome, problems.get("not-offered", ""))
        if worst is None or not math.isfinite(worst.reference.floor):
            return Finding(law.name, outcome, detail)
        return Finding(law.name, outcome, detail, worst.difference, worst.reference.floor)

    def _confirmed(self, law: Law, case: Case) -> bool:
        """True if other inputs also break the law: where numbers are coarse, some may by chance."""
        for draw in CONFIRMING:
            try:
                if not self._judge(law, replace(case, draw=draw), power=False).broken:
                    return False
            except Exception:
                return False
        return True

    def _judge(self, law: Law, case: Case, power: bool = True) -> _Judged:
        within = self._reference(law, case)
        if math.isnan(within.deviation):
            return _Judged(0.0, within, "outputs are all the same, or not finite")
        if law is gradients and self._judge(cuts, case, power=False).broken:
            return _Judged(0.0, within, "outputs depend on where the text is cut")
        judged, compared = self._compared(law, case, within, self.model)
        if power and not judged.broken:
            needed = within.needed
            if compared.unequal is None:
                judged.weakness = self._weakness(case, within, needed)
            for one, other in compared.unequal or ():
                if not difference(one.value, other.value) / within.deviation > needed:
                    judged.weakness = compared.otherwise
        return judged

    def _compared(
        self, law: Law, case: Case, within: Reference, model: Stateful[Any]
    ) -> tuple[_Judged, Compared]:
        # A case that stopped half-way may have left another mode.
        model.module.eval()
        reading = Reading(model, case, self.seed, self.folder)
        with torch.set_grad_enabled(law.reference is not None):
            compared = law.compare(reading, case)
        judged = _Judged(0.0, within, reading=reading)
        for pair in compared.equal:
            apart = difference(pair[0].value, pair[1].value) / within.deviation
            if apart > judged.difference:
                judged.difference = apart
                judged.pair = pair
        return judged, compared

    def _reference(self, law: Law, case: Case) -> Reference:
        """The case's inputs read in one call: the subject of a law must not set its own floor."""
        pieces = (case.tokens,) if self.claims.anywhere else tuple(n for n in case.pieces if n)
        if law.reference:
            pieces = case.pieces
        strict = law is repeatable or not self.repeatable
        key = (law.reference, case.rows, pieces, strict, case.draw)
        if key not in self._references:
            if law.reference:
                compute = functools.partial(law.reference, self._reading(case), case)
            else:
                compute = functools.partial(self._outputs, Case(case.rows, pieces, draw=case.draw))
            self._references[key] = (
                exact(compute())
                if strict
                else reference(compute, self.model.module, self.seed, self.idle_bits)
            )
        return self._references[key]

    def _weakness(self, case: Case, within: Reference, needed: float) -> str:
        """Name the wrong state that makes too little difference; empty if none does."""
        # A state must matter where it is used; a text with many cuts is cut in the middle here.
        cut = case.pieces[0] if len(case.pieces) == 2 else sum(case.pieces[:-1])
        if len(case.pieces) > 3 or not 0 < cut < case.tokens:
            cut = case.tokens // 2
        key = (case.rows, case.tokens, cut, case.draw)
        if key not in self._powers:
            # Where numbers are coarse, it is the kind of case that must be able to show something.
            draws = (case.draw, *(CONFIRMING if within.coarse else ()))
            tried = [self._wrong(replace(case, draw=draw), cut) for draw in draws]
            apart = {
                name: max(each[name] for each in tried) / within.deviation for name in tried[0]
            }
            if within.coarse:
                # A single token is often less than rounding there.
                del apart[ONE_OLD]
            self._powers[key] = next(
                (
                    f"{name} changes outputs by {by:.1e} only, where {needed:.1e} is needed"
                    for name, by in apart.items()
                    if not by > needed
                ),
                "",
            )
        return self._powers[key]

    @torch.no_grad()
    def _wrong(self, case: Case, cut: int) -> dict[str, float]:
        """Differences of outputs after ``cut`` tokens with states that are wrong, by their kind."""
        reading = self._reading(Case(case.rows, (cut, case.tokens - cut), draw=case.draw))
        x = reading.x.value
        others = x.roll(1, 0) if case.rows > 1 else reading.other.value[:1]

        def read_on(before: Tensor | None) -> Tensor:
            state = called(self.model.start, case.rows)
            if before is not None and before.shape[1]:
                state = called(self.model.read, before, state)[1]
            return called(self.model.read, x[:, cut:], state)[0]

        right = read_on(x[:, :cut])
        wrong = {
            "an empty state": read_on(None),
            "a state of other rows": read_on(others[:, :cut]),
            ONE_OLD: read_on(x[:, : cut - 1]),
        }
        return {name: difference(right, outputs) for name, outputs in wrong.items()}

    def _shrunk(self, law: Law, case: Case, judged: _Judged) -> Finding:
        """The smallest case found in which the law is broken as clearly, or nearly so."""
        end = time.process_time() + SHRINKING
        coarse = judged.reference.coarse
        enough = judged.difference / 2 if coarse else min(judged.difference / 10, 1e-2)
        smaller = iter(_smaller(case))
        while time.process_time() < end and (candidate := next(smaller, None)):
            try:
                # A chance difference may occur once.
                times = 4 if law is repeatable else 1
                several = [self._judge(law, candidate, power=False) for _ in range(times)]
                tried = min(several, key=lambda each: each.difference)
            except Exception:
                continue
            if tried.broken and tried.difference > enough:
                case = candidate
                judged = tried
                smaller = iter(_smaller(case))
        if not self._again(law, case, judged.reference):
            self._past.append(law.name)
            detail = f"depends on earlier calls, as a model that has read nothing shows ({case})"
            return Finding(law.name, "inconclusive", detail)
        assert judged.reading
        assert judged.pair
        expected, seen = (each.text for each in judged.pair)
        shown = f"({expected} - {seen}).abs().max().item()"
        detail = str(case)
        shapes = [list(each.value.shape) for each in judged.pair]
        if shapes[0] != shapes[1]:
            shown = f"{expected}.shape, {seen}.shape"
            detail += f": outputs of shape {shapes[1]} instead of {shapes[0]}"
        rounding = judged.reference.floor * judged.reference.deviation
        lines = judged.reading.lines
        text = script(self.model, lines, shown, f"rounding explains {rounding:.0e}")
        return Finding(law.name, "broken", detail, judged.difference, judged.reference.floor, text)

    def _again(self, law: Law, case: Case, within: Reference) -> bool:
        """True if a case breaks the law again, in a model that has read nothing if that can be had."""
        for _ in range(4 if law is repeatable else 1):
            try:
                judged, _ = self._compared(law, case, within, self._fresh())
            except Exception:
                continue
            if judged.broken:
                return True
        return False

    def _fresh(self) -> Stateful[Any]:
        return self.model if self._unread is None else copy.deepcopy(self._unread)

    @torch.no_grad()
    def _first_and_last(self) -> Finding | None:
        """The first reading of all beside the same one now."""
        assert self._first
        case, before = self._first
        try:
            self.model.module.eval()
            within = self._reference(cuts, case)
            apart = difference(before, self._outputs(case)) / within.deviation
        except Exception:
            return None
        judged = _Judged(apart, within)
        if apart > within.threshold:
            text = self._script_of_history(case, within) if self._unread is not None else None
            return self._finding_of_history(
                f"the first reading of all and the same one later: {case}", judged, text
            )
        if self._past:
            text = self._script_of_history(case, within) if self._unread is not None else None
            return self._finding_of_history(f"seen in {self._past[0]}", judged, text)
        return None

    def _finding_of_history(self, what: str, judged: _Judged, text: str | None) -> Finding:
        detail = f"outputs depend on earlier calls ({what})"
        if text is None:
            detail += "; no script of a few calls shows it"
        floor = judged.reference.floor
        return Finding(order_of_calls.name, "broken", detail, judged.difference, floor, text)

    @torch.no_grad()
    def _script_of_history(self, case: Case, within: Reference) -> str | None:
        """A script that shows the effect of earlier calls, if one was seen to."""
        for calls in (8, 64, 512):
            try:
                reading = Reading(self._fresh(), case, self.seed, self.folder)
                before, _ = reading.read_all(reading.x, case.pieces)
                rows = case.rows + 2
                most = case.tokens
                reading.lines += [
                    f"for call in range({calls}):",
                    f"    y, s = read(other[:, : call % {most} + 1], start({rows}))",
                ]
                for call in range(calls):
                    if time.process_time() > self.deadline:
                        return None
                    part = reading.other.value[:, : call % most + 1].clone()
                    reading.model.read(part, reading.model.start(rows))
                after, _ = reading.read_all(reading.x, case.pieces)
            except Exception:
                return None
            first = join(before)
            last = join(after)
            apart = difference(first.value, last.value)
            if apart > within.threshold * within.deviation:
                shown = f"({first.text} - {last.text}).abs().max().item()"
                rounding = f"rounding explains {within.floor * within.deviation:.0e}"
                return script(self.model, reading.lines, shown, rounding)
        return None

    def _bounded(self) -> Finding:
        # The long ones of ten segments fill every internal length.
        reading = self._reading(Case(1, (-(-length_of(self.claims) // (EARLY // 2)),)))
        try:
            outcome, detail = growth(self.model, self.claims, reading.x.value, self.deadline)
        except Exception as error:
            return Finding(BOUNDED, "refused", said(error))
        text = None
        if outcome == "broken" and not detail.startswith(KEEPS):
            lines = [*reading.lines, *SIZES.splitlines()]
            text = script(self.model, lines, "sizes[9::99]", "bytes, which should not grow")
        return Finding(BOUNDED, outcome, detail, script=text)


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with fewer tokens, cuts or rows, the much smaller first."""
    pieces = case.pieces
    if len(pieces) > 3:
        first = pieces[: len(pieces) // 2]
        second = pieces[len(pieces) // 2 :]
        for half in (first, second):
            if len(half) > 1:
                yield replace(case, pieces=half)
        # As many tokens in fewer calls.
        yield replace(case, pieces=(sum(first), *second))
        yield replace(case, pieces=(*first, sum(second)))
        for i in range(len(pieces)):
            yield replace(case, pieces=pieces[:i] + pieces[i + 1 :])
    for i, piece in enumerate(pieces):
        least = 1 if i == len(pieces) - 1 else 0
        for fewer in sorted({least, 1, piece // 2, piece - 1}):
            if least <= fewer < piece:
                yield replace(case, pieces=(*pieces[:i], fewer, *pieces[i + 1 :]))
    if case.rows > 1:
        yield replace(case, rows=case.rows - 1)


def _copied(model: Stateful[Any]) -> Stateful[Any] | None:
    """A copy of a model that is not large (None: it cannot be had)."""
    if sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > FRESH_BYTES:
        return None
    try:
        return copy.deepcopy(model)
    except Exception:
        return None
