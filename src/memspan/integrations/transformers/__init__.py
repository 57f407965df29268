"""Trained models as models of the ``transformers`` library.

Importing this module registers them with transformers' Auto classes, so that ``from_pretrained`` reads
what ``memspan export RUN --to transformers DIR`` or :func:`export` wrote::

    import memspan.integrations.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("DIR")
    tokenizer = AutoTokenizer.from_pretrained("DIR")

Needs ``transformers``; without it the import raises :class:`memspan.MemspanError`.
"""

from memspan.installed import require

require("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from memspan.integrations.transformers.cache import MemspanCache  # noqa: E402
from memspan.integrations.transformers.config import MemspanConfig  # noqa: E402
from memspan.integrations.transformers.export import export, from_run  # noqa: E402
from memspan.integrations.transformers.model import MemspanForCausalLM  # noqa: E402
from memspan.integrations.transformers.tokenizer import fast_tokenizer  # noqa: E402

__all__ = [
    "MemspanCache",
    "MemspanConfig",
    "MemspanForCausalLM",
    "export",
    "fast_tokenizer",
    "from_run",
]

AutoConfig.register(MemspanConfig.model_type, MemspanConfig, exist_ok=True)
AutoModelForCausalLM.register(MemspanConfig, MemspanForCausalLM, exist_ok=True)
