"""constraints.txt pins what the extras bring, too."""

from __future__ import annotations

from test_constraints import unpinned


def test_every_package_of_the_extras_is_pinned() -> None:
    assert not unpinned("memspan[dev,all]"), "run make constraints"
