"""Trained models in EleutherAI's evaluation harness, ``lm_eval``, read with their memory.

Importing this module registers the model ``memspan`` with the harness::

    import lm_eval
    import memspan.integrations.lm_eval

    lm_eval.simple_evaluate("memspan", {"run": "runs/book"}, tasks=["wikitext"])

``python -m memspan.integrations.lm_eval`` is the harness's command line with that model. Needs
``memspan[lm-eval]``; without it the import raises :class:`memspan.MemspanError`.
"""

from memspan.integrations.installed import require

require("lm-eval")

from memspan.integrations.lm_eval.model import MemspanLM  # noqa: E402

__all__ = ["MemspanLM"]
