"""Trained models as models of the ``transformers`` library.

Importing this module registers them with transformers' Auto classes, so that ``from_pretrained`` reads
what ``memspan export RUN --to transformers DIR`` or :func:`export` wrote::

    import memspan.lab.integrations.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("DIR")
    tokenizer = AutoTokenizer.from_pretrained("DIR")

:func:`to_gated_delta_rule` and :func:`from_gated_delta_rule` convert a single gated-delta layer of
Qwen3-Next, Qwen3.5 or OLMo Hybrid.

Needs ``transformers``; without it the import raises :class:`memspan.MemspanError`.
"""

from memspan.lab.installed import require

require("transformers")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from memspan.lab.integrations.transformers.cache import MemspanCache  # noqa: E402
from memspan.lab.integrations.transformers.config import MemspanConfig  # noqa: E402
from memspan.lab.integrations.transformers.export import export, from_run  # noqa: E402
from memspan.lab.integrations.transformers.gated_delta import (  # noqa: E402
    from_gated_delta_rule,
    to_gated_delta_rule,
)
from memspan.lab.integrations.transformers.model import (  # noqa: E402
    MemspanForCausalLM,
    MemspanForSequenceClassification,
    MemspanModel,
)
from memspan.lab.integrations.transformers.tokenizer import fast_tokenizer  # noqa: E402

__all__ = [
    "MemspanCache",
    "MemspanConfig",
    "MemspanForCausalLM",
    "MemspanForSequenceClassification",
    "MemspanModel",
    "export",
    "fast_tokenizer",
    "from_gated_delta_rule",
    "from_run",
    "to_gated_delta_rule",
]

AutoConfig.register(MemspanConfig.model_type, MemspanConfig, exist_ok=True)
AutoModel.register(MemspanConfig, MemspanModel, exist_ok=True)
AutoModelForCausalLM.register(MemspanConfig, MemspanForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    MemspanConfig, MemspanForSequenceClassification, exist_ok=True
)
# The trainer goes by this table, not by what is registered, when it decides whether labels are shifted.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MemspanConfig.model_type] = MemspanForCausalLM.__name__
