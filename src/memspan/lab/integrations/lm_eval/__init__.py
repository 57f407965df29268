"""Trained models in EleutherAI's evaluation harness, ``lm_eval``, read with their memory.

Importing this module registers the model ``memspan`` with the harness::

    import lm_eval
    import memspan.lab.integrations.lm_eval

    lm_eval.simple_evaluate("memspan", {"run": "runs/book"}, tasks=["wikitext"])

``python -m memspan.lab.integrations.lm_eval`` is the harness's command line with that model. Needs
``lm-eval``; without it the import raises :class:`memspan.MemspanError`.
"""

import sys

from memspan.errors import MemspanError
from memspan.lab.installed import require

try:
    require("lm-eval")
except MemspanError as error:
    # ``python -m`` imports this before __main__, which could say it in one line; argv is -m then.
    if sys.argv[:1] != ["-m"]:
        raise
    print(f"memspan: {error}", file=sys.stderr)
    sys.exit(2)

from memspan.lab.integrations.lm_eval.model import MemspanLM

__all__ = ["MemspanLM"]
