"""Try the laws of a model that carries state."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import json
import math
import platform
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from statelaws.case import Case, Named, join
from statelaws.effect import without_effect
from statelaws.errors import NotOfferedError, RefusedError, StatelawsError
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
from statelaws.laws import LAWS, ROWS, Compared, Law, length_of
from statelaws.protocol import Stateful
from statelaws.reading import ITSELF, Reading, called, device_of
from statelaws.script import script
from statelaws.states import leaves_of, size_of

Outcome = Literal["holds", "broken", "inconclusive", "refused", "not-offered"]

BOUNDED = "bounded"
NAMES = (*(law.name for law in LAWS[:-1]), BOUNDED, LAWS[-1].name)
"""All laws, in the order of a report."""
SAYS = {law.name: law.says for law in LAWS} | {BOUNDED: "the state grows only if it says so"}
SHRINKING = 2.0
"""Seconds to search for the smallest case that breaks a law."""
EARLY, MIDDLE, LATE, LATE_IF_GROWING = 10, 500, 1000, 100
"""Numbers of segments after which a state's size is measured."""
FRESH_BYTES = 1 << 26
"""The largest weights of which a copy is kept, to repeat on it what was found."""
FIRST = ("repeatable", "order-of-calls", "causality", "rows", "values", "cuts")
"""Laws that explain others, the first at fault first."""
CONFIRMING = (4, 5, 6)
"""Draws of inputs with which something is seen again."""
ONE_OLD = "a state one token old"
KEEPS = "the model itself keeps"
SIZES = """\
import pickle
state, sizes = start(1), []
for segment in range(1000):
    y, state = read(x if segment % 2 else x[:, :1], state)
    sizes.append(len(pickle.dumps(state)))"""
"""Code that shows the sizes of a state's file."""


@dataclass(frozen=True)
class Finding:
    """The result of one law."""

    law: str
    outcome: Outcome
    detail: str = ""
    """The reason: the smallest case of a broken law, the model's own error, or what was missing."""
    difference: float | None = None
    """The largest, relative to the outputs' deviation; in the smallest case if the law is broken."""
    floor: float | None = None
    """The effect of one unit in the last place of the weights in that case, relative to the deviation.
    A law is broken above twenty times that."""
    script: str | None = None
    """Python that shows a broken law."""


@dataclass(frozen=True)
class Report:
    """The results of all laws that were asked for."""

    findings: tuple[Finding, ...]
    crossed: Mapping[str, tuple[int, int]]
    """Internal lengths in tokens, by name, and how often they were crossed."""
    dtype: str
    """Type of the outputs."""
    seed: int
    seconds: float
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """Remarks for a reader of the report, in sentences."""
    tried: bool = True
    """False if no law could be tried: the model cannot be read, or its state has no effect."""

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The laws that are broken."""
        return tuple(finding for finding in self.findings if finding.outcome == "broken")

    def __getitem__(self, law: str) -> Finding:
        return next(finding for finding in self.findings if finding.law == law)

    def __str__(self) -> str:
        """A table for a terminal of a hundred columns."""
        lines = [f"{'law':<15}{'outcome':<14}{'difference':<12}{'floor':<9}".rstrip()]
        before = ""
        for finding in self.findings:
            numbers = (finding.difference, finding.floor)
            first, second = ("" if n is None else f"{n:.1e}" for n in numbers)
            line = f"{finding.law:<15}{finding.outcome:<14}{first:<12}{second:<9}"
            repeated = len(finding.detail) > 50 and finding.detail == before
            before = finding.detail
            detail = ["as above"] if repeated else textwrap.wrap(finding.detail, 50) or [""]
            lines.append((line + detail[0]).rstrip())
            lines += [" " * len(line) + more for more in detail[1:]]
        crossed = [
            f"{name} of {length}, {f'{times} times' if times else 'never'}"
            for name, (length, times) in self.crossed.items()
        ]
        if crossed:
            lines.append("Crossed: " + "; ".join(crossed) + ".")
        for note in self.notes:
            lines += textwrap.wrap(note, 99)
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines.append(f"{self.dtype}, seed {self.seed}, {self.seconds:.1f} s; {versions}.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON; infinite differences are the string ``"infinite"``."""
        content = asdict(self)
        for finding in content["findings"]:
            if finding["difference"] is not None and not math.isfinite(finding["difference"]):
                finding["difference"] = "infinite"
        return json.dumps(content, indent=2, allow_nan=False)


def check(
    model: Stateful[Any],
    laws: Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
) -> Report:
    """Try ``laws`` of ``model``, by name (None: all of :data:`NAMES`).

    After ``budget`` CPU seconds, over all threads, no new case is started; a law that had more to try
    is *inconclusive*. Weights, buffers, modes and random numbers are restored afterwards.

    Raises:
        StatelawsError: there is no such law; the budget is not positive; the model has no weights.
    """
    asked = NAMES if laws is None else tuple(laws)
    if unknown := [name for name in asked if name not in NAMES]:
        raise StatelawsError(f"there is no law {unknown[0]!r}: use {', '.join(NAMES)}")
    if not budget > 0:
        raise StatelawsError(f"budget must be a positive number of seconds, not {budget!r}")
    if any(child is model.module for child in model.module.children()):
        raise StatelawsError(ITSELF)
    if any(each.is_meta for each in (*model.module.parameters(), *model.module.buffers())):
        raise StatelawsError("its weights are on the device meta, without values: load them first")
    started = time.process_time()
    notes = []
    module = model.module
    # A single layer is the same in both, but for torch's recurrent ones with dropout.
    if module.training and (list(module.children()) or vars(module).get("dropout")):
        notes.append("It came in training mode, and was checked in evaluation mode.")
    with as_it_was(model), tempfile.TemporaryDirectory() as folder:
        bench = _Bench(model, seed, budget, Path(folder))
        findings = bench.findings([name for name in NAMES if name in asked])
    tokens = length_of(bench.claims)
    crossed = {
        name: (length, (tokens - 1) // length if name in bench.claims.lengths else 0)
        for name, length in model.claims.lengths.items()
    }
    seconds = time.process_time() - started
    broken = [finding.law for finding in findings if finding.outcome == "broken"]
    if not bench.repeatable and not [*module.children(), *module.parameters()]:
        notes.append(
            "It has no module with weights, so nothing was put into evaluation mode: is dropout on? "
            "Function takes module=."
        )
    if len(broken) > 1:
        first = next((name for name in FIRST if name in broken), broken[0])
        notes.append(f"Look at {first} first: the others may follow from it.")
    versions = _versions(model)
    return Report(
        findings, crossed, bench.dtype, seed, seconds, versions, tuple(notes), bench.tried
    )


@contextmanager
def as_it_was(model: Stateful[Any]) -> Iterator[None]:
    """``model`` in evaluation mode; changes made inside the block are undone afterwards."""
    module, device = model.module, device_of(model)
    modes = [(each, each.training) for each in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            module.eval()
            yield
        finally:
            for each, training in modes:
                each.training = training
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)


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


class _Bench:
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
        for law in (LAWS[0], LAWS[-1], *LAWS[1:-1]):
            if law.name in names or law.name == "repeatable":
                found[law.name] = self._examine(law)
            if law.name == "repeatable":
                self.repeatable = found[law.name].outcome != "broken"
        last = LAWS[-1].name
        if last in names and self.repeatable and found[last].outcome != "broken":
            found[last] = self._first_and_last() or found[last]
        if BOUNDED in names:
            found[BOUNDED] = self._bounded()
        return tuple(found[name] for name in names)

    def _fit(self) -> str | None:
        """Drop the longest lengths while the model refuses so many tokens; returns why none fits."""
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
        if not self.repeatable and law.name != "order-of-calls":
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
                and law.name not in ("repeatable", "gradients")
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
        """True if other inputs break the law, too: where numbers are coarse, some may by chance."""
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
        if law.name == "gradients" and self._judge(LAWS[1], case, power=False).broken:
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
                judged.difference, judged.pair = apart, pair
        return judged, compared

    def _reference(self, law: Law, case: Case) -> Reference:
        """The case's inputs read in one call: the subject of a law must not set its own floor."""
        pieces = (case.tokens,) if self.claims.anywhere else tuple(n for n in case.pieces if n)
        if law.reference:
            pieces = case.pieces
        strict = law.name == "repeatable" or not self.repeatable
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
        """Which wrong state, if any, makes too little difference."""
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
                times = 4 if law.name == "repeatable" else 1
                several = [self._judge(law, candidate, power=False) for _ in range(times)]
                tried = min(several, key=lambda each: each.difference)
            except Exception:
                continue
            if tried.broken and tried.difference > enough:
                case, judged = candidate, tried
                smaller = iter(_smaller(case))
        if not self._again(law, case, judged.reference):
            self._past.append(law.name)
            detail = f"depends on earlier calls, as a model that has read nothing shows ({case})"
            return Finding(law.name, "inconclusive", detail)
        assert judged.reading
        assert judged.pair
        expected, seen = (each.text for each in judged.pair)
        shown, detail = f"({expected} - {seen}).abs().max().item()", str(case)
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
        for _ in range(4 if law.name == "repeatable" else 1):
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
            within = self._reference(LAWS[1], case)
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
        return Finding(LAWS[-1].name, "broken", detail, judged.difference, floor, text)

    @torch.no_grad()
    def _script_of_history(self, case: Case, within: Reference) -> str | None:
        """A script that shows the effect of earlier calls, if one was seen to."""
        for calls in (8, 64, 512):
            try:
                reading = Reading(self._fresh(), case, self.seed, self.folder)
                before, _ = reading.read_all(reading.x, case.pieces)
                rows, most = case.rows + 2, case.tokens
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
            first, last = join(before), join(after)
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
            outcome, detail = self._growth(reading.x.value)
        except Exception as error:
            return Finding(BOUNDED, "refused", said(error))
        text = None
        if outcome == "broken" and not detail.startswith(KEEPS):
            lines = [*reading.lines, *SIZES.splitlines()]
            text = script(self.model, lines, "sizes[9::99]", "bytes, which should not grow")
        return Finding(BOUNDED, outcome, detail, script=text)

    @torch.no_grad()
    def _growth(self, inputs: Tensor) -> tuple[Outcome, str]:
        """How the state's size develops in a stream of ``inputs`` and their first token by turns."""
        late = LATE if self.claims.bounded else LATE_IF_GROWING
        state = called(self.model.start, len(inputs))
        sizes: dict[int, int] = {}
        kept: dict[int, int] = {}
        for segment in range(1, late + 1):
            if time.process_time() > self.deadline:
                return "inconclusive", f"{segment - 1} of {late} segments were read in the time"
            # Many models take another path for single tokens.
            part = inputs if segment % 2 else inputs[:, :1]
            state = called(self.model.read, part.clone(), state)[1]
            if segment in (EARLY, MIDDLE, late):
                sizes[segment] = size_of(leaves_of(state))
                kept[segment] = size_of(_kept(self.model))
        early, last = sizes[EARLY], sizes[late]
        # Beside the state; what fills up and stops is a table.
        if kept[late] > max(kept[EARLY], kept.get(MIDDLE, 0)):
            found = ", ".join(f"{size:,} after {segment}" for segment, size in kept.items())
            per_token = (kept[late] - kept[EARLY]) / ((inputs.shape[1] + 1) / 2 * (late - EARLY))
            return "broken", (
                f"{KEEPS} {per_token:,.0f} bytes a token, beside its state: {found} "
                f"segments of {inputs.shape[1]} and 1 tokens"
            )
        if last == early:
            return "holds", f"{last:,} bytes throughout {late} segments"
        measured = ", ".join(f"{size:,} after {segment}" for segment, size in sizes.items())
        text = f"bytes: {measured} segments of {inputs.shape[1]} and 1 tokens"
        if self.claims.bounded:
            # A window that is longer than the first ten segments fills up, and stops.
            return ("broken" if last > max(early, sizes[MIDDLE]) else "holds"), text
        # Room for more may be made in advance, as much again.
        if last > 2.2 * early * late / EARLY:
            return "broken", f"faster than the text: {text}"
        per_token = (last - early) / ((inputs.shape[1] + 1) / 2 * (late - EARLY))
        return "holds", f"grows by {per_token:,.0f} bytes a token, as it says"


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with fewer tokens, cuts or rows, the much smaller first."""
    pieces = case.pieces
    if len(pieces) > 3:
        first, second = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
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


def said(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, RefusedError | NotOfferedError):
        return text
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200)


def _kept(model: Stateful[Any]) -> list[Any]:
    """Tensors and arrays that a model keeps besides its weights and buffers, in attributes or in what
    its functions close over."""
    hidden = ("_parameters", "_buffers", "_modules")
    holders = [vars(each) for each in model.module.modules()]
    holders.append(getattr(model, "__dict__", {}))
    parts = [value for holder in holders for name, value in holder.items() if name not in hidden]
    cells = [cell for part in parts for cell in getattr(part, "__closure__", None) or ()]
    for cell in cells:
        # A cell may be empty.
        with suppress(ValueError):
            parts.append(cell.cell_contents)
    return [
        leaf
        for leaf in leaves_of(parts)
        if isinstance(leaf, Tensor) or isinstance(getattr(leaf, "nbytes", None), int)
    ]


def _copied(model: Stateful[Any]) -> Stateful[Any] | None:
    """A copy of a model that is not large (None: it cannot be had)."""
    if sum(p.nbytes for p in (*model.module.parameters(), *model.module.buffers())) > FRESH_BYTES:
        return None
    try:
        return copy.deepcopy(model)
    except Exception:
        return None


def _versions(model: Stateful[Any]) -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    package = type(model.module).__module__.partition(".")[0]
    try:
        return {package: importlib.metadata.version(package), **versions}
    except importlib.metadata.PackageNotFoundError:
        return versions
