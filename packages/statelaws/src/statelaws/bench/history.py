"""Looks for an effect of earlier calls, which a model that has read nothing does not show."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor

from statelaws.bench.judge import Judge
from statelaws.case import Case, join
from statelaws.floor import Reference, difference
from statelaws.laws.cuts import cuts
from statelaws.laws.law import Law
from statelaws.laws.order_of_calls import order_of_calls
from statelaws.laws.repeatable import repeatable
from statelaws.protocol import Stateful
from statelaws.reading import Reading, given_text, reads
from statelaws.report import Finding
from statelaws.script import script

FRESH_BYTES = 1 << 26
"""The largest weights of which a copy is kept, to repeat on it what was found."""


class History:
    """The model as it came, and the first reading of all."""

    def __init__(self, judge: Judge, deadline: float) -> None:
        self._judge = judge
        self._deadline = deadline
        self._unread = _copied(judge.model)
        """The model as it came, which has read nothing (None: it cannot be copied)."""
        self._first: tuple[Case, Tensor] | None = None
        self._past: list[str] = []
        """Laws that were broken after other calls, and not in a model that had read nothing."""

    def begins(self, case: Case, outputs: Tensor) -> None:
        """Keep the first reading of all."""
        self._first = case, outputs.clone()

    def confirms(self, law: Law, case: Case, within: Reference) -> bool:
        """True if a case breaks the law again, in a model that has read nothing if that can be had."""
        for _ in range(4 if law is repeatable else 1):
            try:
                judged, _ = self._judge.compared(law, case, within, self._fresh())
            except Exception:
                continue
            if judged.broken:
                return True
        self._past.append(law.name)
        return False

    def _fresh(self) -> Stateful[Any]:
        return self._judge.model if self._unread is None else copy.deepcopy(self._unread)

    @torch.no_grad()
    def finding(self) -> Finding | None:
        """Compare the first reading of all with the same one now. Report a difference, or one that a
        law saw after other calls alone."""
        assert self._first
        case, before = self._first
        try:
            self._judge.model.module.eval()
            within = self._judge.reference(cuts, case)
            apart = difference(before, self._judge.outputs(case)) / within.deviation
        except Exception:
            return None
        if apart > within.threshold:
            seen = f"the first reading of all and the same one later: {case}"
        elif self._past:
            seen = f"seen in {self._past[0]}"
        else:
            return None
        detail = f"outputs depend on earlier calls ({seen})"
        text = None if self._unread is None else self._script(case, within)
        if text is None:
            detail += "; no script of a few calls shows it"
        return Finding(order_of_calls.name, "broken", detail, apart, within.floor, text)

    @torch.no_grad()
    def _script(self, case: Case, within: Reference) -> str | None:
        """A script that shows the effect of earlier calls, if one was seen to."""
        for calls in (8, 64, 512):
            try:
                reading = Reading(self._fresh(), case, self._judge.seed, self._judge.folder)
                before, _ = reading.read_all(reading.x, case.pieces)
                rows = case.rows + 2
                most = case.tokens
                inputs = given_text(reading.model, f"other[:, : call % {most} + 1]")
                reading.lines += [
                    f"for call in range({calls}):",
                    f"    y, s = read({inputs}, start({rows}))",
                ]
                for call in range(calls):
                    if time.process_time() > self._deadline:
                        return None
                    part = reading.other.value[:, : call % most + 1].clone()
                    reads(reading.model)(part, reading.model.start(rows))
                after, _ = reading.read_all(reading.x, case.pieces)
            except Exception:
                return None
            first = join(before)
            last = join(after)
            apart = difference(first.value, last.value)
            if apart > within.threshold * within.deviation:
                shown = f"({first.text} - {last.text}).abs().max().item()"
                rounding = f"rounding explains {within.floor * within.deviation:.0e}"
                return script(reading.model, reading.lines, shown, rounding)
        return None


def _copied(model: Stateful[Any]) -> Stateful[Any] | None:
    """A copy of a model that is not large (None: it cannot be had)."""
    if sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > FRESH_BYTES:
        return None
    try:
        return copy.deepcopy(model)
    except Exception:
        return None
