"""The laws, one in each file, in the order of a report.

All but ``cuts`` compare readings with the same cuts, so that each bug breaks its own law, and models
whose outputs depend on the cuts by design can also be tested. ``bounded`` compares no outputs: it
measures a state's size; ``long-run`` reads one long text.
"""

from __future__ import annotations

from statelaws.laws.bounded import BOUNDED
from statelaws.laws.causality import causality
from statelaws.laws.cuts import cuts
from statelaws.laws.files import files
from statelaws.laws.fresh_start import fresh_start
from statelaws.laws.gradients import gradients
from statelaws.laws.law import Law
from statelaws.laws.long_run import LONG_RUN
from statelaws.laws.order_of_calls import order_of_calls
from statelaws.laws.padding import padding_left, padding_right
from statelaws.laws.repeatable import repeatable
from statelaws.laws.replay import replay
from statelaws.laws.roll_back import roll_back
from statelaws.laws.rows import rows
from statelaws.laws.values import values

BEFORE_BOUNDED: tuple[Law, ...] = (
    repeatable,
    cuts,
    causality,
    rows,
    values,
    fresh_start,
    padding_right,
    padding_left,
    roll_back,
    files,
    gradients,
    replay,
)
COMPARING: tuple[Law, ...] = (*BEFORE_BOUNDED, order_of_calls)
"""Laws that compare outputs."""
NAMES = (*(law.name for law in BEFORE_BOUNDED), BOUNDED, LONG_RUN, order_of_calls.name)
"""All laws, in the order of a report."""
SAYS = {law.name: law.says for law in COMPARING} | {
    BOUNDED: "the state grows only if it says so",
    LONG_RUN: "one call and single tokens stay equal in a long run",
}
