"""``memspan check`` from Python: the laws of any model that carries state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memspan.calls import checked
from memspan.lab.exclusive import random_numbers
from memspan.lab.installed import require
from memspan.native.waiting import sharing_cores

if TYPE_CHECKING:
    from statelaws import Report


@checked
@random_numbers()
@sharing_cores()
def check(
    model: object,
    laws: str | Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
) -> Report:
    """Check the laws of a model that carries state. Needs ``statelaws``.

    Args:
        model: an object with the functions of ``statelaws.Stateful``, a run, a :class:`LanguageModel`
            or a backbone, one of torch's recurrent modules, a causal language model as in transformers,
            or the name of one: what ``memspan check`` takes.
        laws: their names, or one name (None: all of them).
        seed: of the inputs, and of random weights.
        budget: CPU seconds, over all threads, after which no new case is started.

    Raises:
        MemspanError: the model carries no state, cannot be read here, or does not exist; there is no
            such law; the budget is not positive; statelaws is not installed.

    Example::

        report = memspan.check(torch.nn.GRU(8, 16))
        assert not report.broken, report
    """
    require("statelaws")
    import statelaws
    from memspan.lab.targets import as_stateful, errors_as_ours, named

    stateful = named(model, seed=seed) if isinstance(model, str) else as_stateful(model)
    laws = [laws] if isinstance(laws, str) else laws
    with errors_as_ours():
        return statelaws.check(stateful, laws, seed, budget)
