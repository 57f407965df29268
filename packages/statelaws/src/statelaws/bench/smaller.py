"""Makes a case that breaks a law smaller."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from statelaws.bench.judge import Judge, Judged
from statelaws.case import Case
from statelaws.laws.law import Law
from statelaws.laws.repeatable import repeatable

SECONDS = 2.0
"""CPU time of a search."""


def smallest(judge: Judge, law: Law, case: Case, judged: Judged) -> tuple[Case, Judged]:
    """The smallest case found in which the law is broken as clearly, or nearly so."""
    end = time.process_time() + SECONDS
    coarse = judged.reference.coarse
    enough = judged.difference / 2 if coarse else min(judged.difference / 10, 1e-2)
    smaller = iter(_smaller(case))
    while time.process_time() < end and (candidate := next(smaller, None)):
        try:
            # A chance difference may occur once.
            times = 4 if law is repeatable else 1
            several = [judge.judge(law, candidate, power=False) for _ in range(times)]
            tried = min(several, key=lambda each: each.difference)
        except Exception:
            continue
        if tried.broken and tried.difference > enough:
            case = candidate
            judged = tried
            smaller = iter(_smaller(case))
    return case, judged


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
