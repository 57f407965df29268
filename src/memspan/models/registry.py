"""Architecture name -> its options, and through ``build()`` its model. The only list of names."""

from __future__ import annotations

from memspan.errors import MemspanError
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.delta_product.config import DeltaProductConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.gated_delta_net_2.config import GatedDeltaNet2Config
from memspan.models.gla.config import GLAConfig
from memspan.models.infini.config import InfiniConfig
from memspan.models.kda.config import KDAConfig
from memspan.models.lstm.config import LSTMConfig
from memspan.models.mamba_2.config import Mamba2Config
from memspan.models.options import BackboneConfig
from memspan.models.rmt.config import RMTConfig
from memspan.models.rwkv_7.config import RWKV7Config
from memspan.models.transformer.config import TransformerConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

MODELS: dict[str, type[BackboneConfig]] = {
    "transformer-xl": TransformerXLConfig,
    "compressive": CompressiveConfig,
    "feedback": FeedbackConfig,
    "fast-weights": FastWeightsConfig,
    "gated-delta-net": GatedDeltaNetConfig,
    "infini": InfiniConfig,
    "kda": KDAConfig,
    "rmt": RMTConfig,
    "mamba-2": Mamba2Config,
    "gla": GLAConfig,
    "delta-product": DeltaProductConfig,
    "gated-delta-net-2": GatedDeltaNet2Config,
    "rwkv-7": RWKV7Config,
    "lstm": LSTMConfig,
    "transformer": TransformerConfig,
}
"""Every architecture, those of other packages included once they are registered."""


def load_plugins() -> None:
    """Import the modules that installed packages name in the entry point group
    ``memspan.architectures``; they call :func:`register`.

    The command line calls this before it parses anything, since help lists every architecture.
    """
    # Slow to import, and a program that builds models does without.
    from importlib.metadata import entry_points

    for entry in entry_points(group="memspan.architectures"):
        entry.load()


def register(name: str, config: type[BackboneConfig]) -> None:
    """Add an architecture of your own, for ``--model NAME`` and for run folders that name it.

    A class of the same name and module replaces the one before, so a notebook's cell can be run again.

    Args:
        name: lower-case words joined by hyphens.
        config: a frozen dataclass that inherits from :class:`~memspan.models.BackboneConfig`.

    Raises:
        MemspanError: the name is taken by another architecture.
    """
    known = MODELS.setdefault(name, config)
    if (known.__module__, known.__qualname__) != (config.__module__, config.__qualname__):
        raise MemspanError(f"there is an architecture {name!r} already: register yours as another")
    MODELS[name] = config
