"""Tests of pytest, for any package: a case for each law. See the README."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from statelaws.check import check
from statelaws.laws import NAMES, SAYS
from statelaws.protocol import Stateful


def laws(
    make: Callable[[], Stateful[Any]],
    only: Iterable[str] | None = None,
    *,
    seeds: Iterable[int] = (0,),
    budget: float = 30.0,
    inconclusive: bool = False,
    xfail: Mapping[str, str] | None = None,
) -> Callable[..., None]:
    """Make a test with a case for each law and seed.

    A case fails if the law is broken, if no law can be tried at all or, unless ``inconclusive`` is
    true, if it could not be decided; it is skipped if the model does not offer what the law is about,
    or refuses it.

    Args:
        make: called for each case, for a model of its own.
        only: names of the laws to try (None: all).
        seeds: seeds of the inputs.
        budget: CPU seconds of a case after which no new example is tried.
        inconclusive: accept laws that could not be decided.
        xfail: laws that are known to be broken, with the reason; a case fails once they hold.
    """
    names = NAMES if only is None else tuple(only)
    broken = xfail or {}
    cases = [
        pytest.param(name, marks=pytest.mark.xfail(reason=broken[name], strict=True))
        if name in broken
        else name
        for name in names
    ]

    @pytest.mark.parametrize("seed", tuple(seeds))
    @pytest.mark.parametrize("law", cases)
    def test(law: str, seed: int) -> None:
        __tracebackhide__ = True
        model = make()
        if getattr(model, "source", None) is None and not hasattr(model, "made"):
            # Objects that cannot hold it go without.
            with contextlib.suppress(TypeError, AttributeError):
                object.__setattr__(model, "made", _made(make))
        report = check(model, [law], seed, budget)
        finding = report[law]
        if finding.outcome == "refused" and not report.tried:
            pytest.fail(f"refused: {finding.detail}", pytrace=False)
        if finding.outcome in ("not-offered", "refused"):
            pytest.skip(f"{finding.outcome}: {finding.detail}")
        if finding.outcome == "inconclusive" and not inconclusive:
            pytest.fail(f"inconclusive, {law}: {finding.detail}", pytrace=False)
        if finding.outcome == "broken":
            pytest.fail(f"law broken: {SAYS[law]}\n{report}\n\n{finding.script}", pytrace=False)

    return test


def _made(make: Callable[..., Any]) -> str:
    """Python that makes the model, for scripts."""
    module, name = (getattr(make, each, "") for each in ("__module__", "__qualname__"))
    if not name or "<" in name:
        return f"model = ...  # as {name or make!r} of {module or 'the tests'} makes it"
    return f"from {module} import {name.split('.')[0]}\nmodel = {name}()\nmodel.module.eval()"
