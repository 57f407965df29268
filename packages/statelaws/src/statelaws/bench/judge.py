"""Judges one case of a law: the difference it shows, beside the difference that rounding explains."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statelaws.case import Case, Named, join
from statelaws.floor import IdleBits, Reference, difference, exact, reference
from statelaws.laws.cuts import cuts
from statelaws.laws.gradients import gradients
from statelaws.laws.law import Compared, Law
from statelaws.laws.repeatable import repeatable
from statelaws.protocol import Claims, Stateful
from statelaws.reading import Reading, called, reads

CONFIRMING = (4, 5, 6)
"""Draws of inputs with which something is seen again."""
ONE_OLD = "a state one token old"


@dataclass
class Judged:
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


class Judge:
    """Judges cases of one model."""

    def __init__(self, model: Stateful[Any], seed: int, folder: Path) -> None:
        self.model = model
        self.seed = seed
        self.folder = folder
        self.claims: Claims = model.claims
        """The model's claims, without lengths that it refuses."""
        self.repeatable = True
        """False once the same call was seen to give other outputs."""
        self.idle_bits: IdleBits = {}
        self._references: dict[tuple[Any, ...], Reference] = {}
        self._powers: dict[tuple[int, ...], str] = {}

    def reading(self, case: Case) -> Reading:
        return Reading(self.model, case, self.seed, self.folder)

    @torch.no_grad()
    def outputs(self, case: Case) -> Tensor:
        reading = self.reading(case)
        return join(reading.read_all(reading.x, case.pieces)[0]).value

    def judge(self, law: Law, case: Case, power: bool = True) -> Judged:
        within = self.reference(law, case)
        if math.isnan(within.deviation):
            return Judged(0.0, within, "outputs are all the same, or not finite")
        if law is gradients and self.judge(cuts, case, power=False).broken:
            return Judged(0.0, within, "outputs depend on where the text is cut")
        judged, compared = self.compared(law, case, within, self.model)
        if power and not judged.broken:
            needed = within.needed
            if compared.unequal is None:
                judged.weakness = self._weakness(case, within, needed)
            for one, other in compared.unequal or ():
                if not difference(one.value, other.value) / within.deviation > needed:
                    judged.weakness = compared.otherwise
        return judged

    def confirmed(self, law: Law, case: Case) -> bool:
        """True if other inputs also break the law: where numbers are coarse, some may by chance."""
        for draw in CONFIRMING:
            try:
                if not self.judge(law, replace(case, draw=draw), power=False).broken:
                    return False
            except Exception:
                return False
        return True

    def compared(
        self, law: Law, case: Case, within: Reference, model: Stateful[Any]
    ) -> tuple[Judged, Compared]:
        # A case that stopped half-way may have left another mode.
        model.module.eval()
        reading = Reading(model, case, self.seed, self.folder)
        with torch.set_grad_enabled(law.reference is not None):
            compared = law.compare(reading, case)
        judged = Judged(0.0, within, reading=reading)
        for pair in compared.equal:
            apart = difference(pair[0].value, pair[1].value) / within.deviation
            if apart > judged.difference:
                judged.difference = apart
                judged.pair = pair
        return judged, compared

    def reference(self, law: Law, case: Case) -> Reference:
        """The case's inputs read in one call: the subject of a law must not set its own floor."""
        pieces = (case.tokens,) if self.claims.anywhere else tuple(n for n in case.pieces if n)
        if law.reference:
            pieces = case.pieces
        strict = law is repeatable or not self.repeatable
        key = (law.reference, case.rows, pieces, strict, case.draw)
        if key not in self._references:
            if law.reference:
                compute = functools.partial(law.reference, self.reading(case), case)
            else:
                compute = functools.partial(self.outputs, Case(case.rows, pieces, draw=case.draw))
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
        reading = self.reading(Case(case.rows, (cut, case.tokens - cut), draw=case.draw))
        x = reading.x.value
        others = x.roll(1, 0) if case.rows > 1 else reading.other.value[:1]

        read = reads(self.model)

        def read_on(before: Tensor | None) -> Tensor:
            state = called(self.model.start, case.rows)
            if before is not None and before.shape[1]:
                state = read(before, state)[1]
            return read(x[:, cut:], state)[0]

        right = read_on(x[:, :cut])
        wrong = {
            "an empty state": read_on(None),
            "a state of other rows": read_on(others[:, :cut]),
            ONE_OLD: read_on(x[:, : cut - 1]),
        }
        return {name: difference(right, outputs) for name, outputs in wrong.items()}
