"""Lines of the report's picture."""

from __future__ import annotations

import math

from memspan.lab.measurement.report import with_gaps


def test_lines_have_gaps_where_nothing_was_measured() -> None:
    """Gaps between memory lengths 0, 16 and 32; none of history, where every octave was measured."""
    places, values = with_gaps([0, 16, 32], [3.0, 2.0, 1.0])
    assert places == [0, 16, 16, 32]
    assert [math.isnan(v) for v in values] == [False, True, False, False]
    octaves = [0, 1, 2, 4, 8], [5.0, 4.0, 3.0, 2.0, 1.0]
    assert with_gaps(*octaves) == octaves
