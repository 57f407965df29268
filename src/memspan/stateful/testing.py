"""The laws as cases of pytest, for the tests of any package: see the README beside this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from memspan.stateful.check import NAMES, SAYS, check
from memspan.stateful.protocol import Stateful


def laws(
    make: Callable[[], Stateful[Any]],
    only: Iterable[str] | None = None,
    *,
    seeds: Iterable[int] = (0,),
    budget: float = 15.0,
    inconclusive: bool = False,
) -> Callable[..., None]:
    """A test with a case for each law and seed, of the model that ``make`` gives anew for each.

    A case fails if the law is broken or, unless ``inconclusive`` is true, if it could not be decided;
    it is skipped if the model does not offer what the law is about, or refuses it.
    """

    @pytest.mark.parametrize("seed", tuple(seeds))
    @pytest.mark.parametrize("law", NAMES if only is None else tuple(only))
    def test(law: str, seed: int) -> None:
        __tracebackhide__ = True
        finding = check(make(), [law], seed, budget)[law]
        why = f"{law}: {finding.detail}"
        if finding.outcome in ("not-offered", "refused"):
            pytest.skip(f"{finding.outcome}: {finding.detail}")
        if finding.outcome == "inconclusive" and not inconclusive:
            pytest.fail(f"inconclusive, {why}", pytrace=False)
        if finding.outcome == "broken":
            numbers = ""
            if finding.difference is not None and finding.floor is not None:
                numbers = f"\noff by {finding.difference:.1e} of the outputs' deviation, where "
                numbers += f"rounding explains {finding.floor:.1e}"
            pytest.fail(f"not so: {SAYS[law]}\n{why}{numbers}\n\n{finding.script}", pytrace=False)

    return test
