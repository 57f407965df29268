"""Examines one model: tries every case of each law, and reports."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from statelaws.bench.history import History
from statelaws.bench.judge import Judge, Judged
from statelaws.bench.smaller import smallest
from statelaws.case import Case
from statelaws.effect import without_effect
from statelaws.errors import NotOfferedError
from statelaws.floor import CLOSE, FACTOR, idle_bits
from statelaws.laws import COMPARING
from statelaws.laws.bounded import BOUNDED, EARLY, KEEPS, growth, sizes_text
from statelaws.laws.gradients import gradients
from statelaws.laws.law import ROWS, Law, length_of
from statelaws.laws.long_run import LONG_RUN, long_run
from statelaws.laws.order_of_calls import order_of_calls
from statelaws.laws.repeatable import repeatable
from statelaws.protocol import Claims, Stateful
from statelaws.report import Finding, Outcome, said
from statelaws.script import script


class Bench:
    def __init__(self, model: Stateful[Any], seed: int, budget: float, folder: Path) -> None:
        self.model = model
        self.budget = budget
        self.deadline = time.process_time() + budget
        self.extra_until = time.process_time() + budget / 3
        """When no more cases are begun that are extra."""
        self.tried = True
        self.dtype = "unknown"
        self._judge = Judge(model, seed, folder)
        self._history = History(self._judge, self.deadline)

    @property
    def claims(self) -> Claims:
        """The model's claims, without lengths that it refuses."""
        return self._judge.claims

    @property
    def repeatable(self) -> bool:
        """False if the same call was seen to give other outputs."""
        return self._judge.repeatable

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
                self._judge.repeatable = found[law.name].outcome != "broken"
        last = order_of_calls.name
        if last in names and self.repeatable and found[last].outcome != "broken":
            found[last] = self._history.finding() or found[last]
        if BOUNDED in names:
            found[BOUNDED] = self._bounded()
        if LONG_RUN in names:
            found[LONG_RUN] = self._long_run()
        return tuple(found[name] for name in names)

    def _fit(self) -> str | None:
        """Drop the longest lengths while the model refuses that many tokens; return why none fits."""
        while True:
            tokens = length_of(self.claims)
            n = max(self.claims.cuts, tokens // 2)
            case = Case(ROWS, (tokens,) if self.claims.anywhere else (n, tokens - n))
            try:
                outputs = self._judge.outputs(case)
                if outputs.shape[:2] != (ROWS, tokens):
                    return (
                        f"it returns outputs {list(outputs.shape)} for {ROWS} rows of {tokens} steps, "
                        "and one for each is needed: Inputs.per_output is of encoders with strides"
                    )
                self._history.begins(case, outputs)
                self.dtype = str(outputs.dtype).removeprefix("torch.")
                compute = functools.partial(self._judge.outputs, case)
                self._judge.idle_bits = idle_bits(compute, self.model.module, self._judge.seed)
                return None
            except Exception as error:
                if not self.claims.lengths:
                    return said(error)
                longest = max(self.claims.lengths.values())
                lengths = {k: n for k, n in self.claims.lengths.items() if n < longest}
                self._judge.claims = replace(self.claims, lengths=lengths)

    def _examine(self, law: Law) -> Finding:
        if missing := law.missing(self.model):
            return Finding(law.name, "not-offered", missing)
        if not self.repeatable and law is not order_of_calls:
            return Finding(law.name, "inconclusive", "the same call twice gives other outputs")
        worst: Judged | None = None
        closest = 0.0
        weak: list[str] = []
        # Where numbers are coarse, many cases show nothing, and it takes one that does.
        strong = False
        problems: dict[Outcome, str] = {}
        for case in law.cases(self.claims, self._judge.seed):
            if case.extra and time.process_time() > self.extra_until:
                continue
            if time.process_time() > self.deadline:
                problems.setdefault("inconclusive", "not all was reached in the time")
                break
            try:
                judged = self._judge.judge(law, case)
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
            if judged.broken and judged.reference.coarse and not self._judge.confirmed(law, case):
                continue
            if judged.broken:
                if (finding := self._broken(law, case, judged)).outcome == "broken":
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

    def _broken(self, law: Law, case: Case, judged: Judged) -> Finding:
        """Report a broken law by the smallest case found, if that breaks it again."""
        case, judged = smallest(self._judge, law, case, judged)
        if not self._history.confirms(law, case, judged.reference):
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
        if remark := self._remark(law, case):
            detail += f": {remark}"
        rounding = judged.reference.floor * judged.reference.deviation
        lines = judged.reading.lines
        text = script(self.model, lines, shown, f"rounding explains {rounding:.0e}")
        return Finding(law.name, "broken", detail, judged.difference, judged.reference.floor, text)

    def _remark(self, law: Law, case: Case) -> str:
        """Say more of a broken law, where another case that breaks it as well tells more."""
        other, remark = law.remark(case) or (None, "")
        try:
            also = other is not None and self._judge.judge(law, other, power=False).broken
        except Exception:
            return ""
        return remark if also else ""

    def _bounded(self) -> Finding:
        # The long ones of ten segments fill every internal length.
        reading = self._judge.reading(Case(1, (-(-length_of(self.claims) // (EARLY // 2)),)))
        try:
            outcome, detail = growth(self.model, self.claims, reading.x.value, self.deadline)
        except Exception as error:
            return Finding(BOUNDED, "refused", said(error))
        text = None
        if outcome == "broken" and not detail.startswith(KEEPS):
            lines = [*reading.lines, *sizes_text(self.model).splitlines()]
            text = script(self.model, lines, "sizes[9::99]", "bytes, which should not grow")
        return Finding(BOUNDED, outcome, detail, script=text)

    def _long_run(self) -> Finding:
        if not self.repeatable:
            return Finding(LONG_RUN, "inconclusive", "the same call twice gives other outputs")
        judge = self._judge
        try:
            return long_run(self.model, judge.seed, judge.idle_bits, self.deadline, self.budget)
        except NotOfferedError as error:
            return Finding(LONG_RUN, "not-offered", said(error))
        except Exception as error:
            return Finding(LONG_RUN, "refused", said(error))
