"""Trained models as models of the ``transformers`` library.

Importing this module registers them with transformers' Auto classes, so that ``from_pretrained`` reads
what ``memspan export RUN --to transformers DIR`` or :func:`export` wrote::

    import memspan.integrations.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("DIR")
    tokenizer = AutoTokenizer.from_pretrained("DIR")

:func:`accelerate` is for models of transformers itself: it puts the operations of memspan into
gated-delta layers on a CPU.

Needs ``transformers``; without it the import raises :class:`memspan.MemspanError`.
"""

from memspan.installed import require

require("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from memspan.integrations.transformers.accelerate import Acceleration, accelerate  # noqa: E402
from memspan.integrations.transformers.cache import MemspanCache  # noqa: E402
from memspan.integrations.transformers.config import MemspanConfig  # noqa: E402
from memspan.integrations.transformers.export import export, from_run  # noqa: E402
from memspan.integrations.transformers.gated_delta import (  # noqa: E402
    from_gated_delta_rule,
    to_gated_delta_rule,
)
from memspan.integrations.transformers.model import MemspanForCausalLM  # noqa: E402
from memspan.integrations.transformers.tokenizer import fast_tokenizer  # noqa: E402

__all__ = [
    "Acceleration",
    "MemspanCache",
    "MemspanConfig",
    "MemspanForCausalLM",
    "accelerate",
    "export",
    "fast_tokenizer",
    "from_gated_delta_rule",
    "from_run",
    "to_gated_delta_rule",
]

AutoConfig.register(MemspanConfig.model_type, MemspanConfig, exist_ok=True)
AutoModelForCausalLM.register(MemspanConfig, MemspanForCausalLM, exist_ok=True)
