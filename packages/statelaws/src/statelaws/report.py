"""The results of a check: a table for people, and JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from statelaws.errors import NotOfferedError, RefusedError

Outcome = Literal["holds", "broken", "inconclusive", "refused", "not-offered"]


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


def said(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, RefusedError | NotOfferedError):
        return text
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200)
