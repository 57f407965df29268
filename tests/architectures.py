"""The architectures and options that the laws are tested over: one line each.

A new architecture is covered by adding lines to :data:`CASES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import Backbone, LanguageModel
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
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.models.rmt.config import RMTConfig
from memspan.models.rwkv_7.config import RWKV7Config
from memspan.models.transformer.config import TransformerConfig
from memspan.models.transformer_xl.config import TransformerXLConfig

VOCABULARY = 11
SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 12}


@dataclass(frozen=True)
class Case:
    """One option of one architecture."""

    backbone: Any
    """Its config."""
    cut_invariant: bool
    """True if reading gives the same, to the last bit of memory, however the text is cut."""
    layout: Callable[[Memory], list[Tensor]] = lambda memory: list(vars(memory).values())
    """Fields of memory that never depend on the cuts: how many slots, which tokens they cover."""
    embedding: EmbeddingConfig = EmbeddingConfig()  # noqa: RUF009
    forgets_segments: bool = False
    """True if nothing of a segment is seen from the next: no memory, or a span of one."""
    sees_itself_only: bool = False
    """True if a token sees no other."""
    cut_fields: tuple[str, ...] = ()
    """Fields of memory that gradients do not flow into."""

    def with_options(self, **options: Any) -> Case:
        """The case with other ones of the backbone's."""
        return replace(self, backbone=replace(self.backbone, **options))

    def model(self, dtype: torch.dtype = torch.float64) -> LanguageModel:
        """The same weights at every call, large enough that everything matters.

        The caller may change the model, which is a new one.
        """
        with torch.random.fork_rng():
            # Random features are drawn when a model is made.
            torch.manual_seed(0)
            model = LanguageModel(VOCABULARY, self.backbone, self.embedding)
        return randomise(model).to(dtype).eval()

    def shared_model(self, dtype: torch.dtype = torch.float64) -> LanguageModel:
        """One model for all tests that do not change it: making one takes as long as a forward."""
        model = _made(self, dtype)
        _lent.setdefault(model, _state(model))
        return model


_lent: dict[LanguageModel, list[Any]] = {}
"""The shared models that the running test has asked for, as they were then."""


def shared_models_are_back() -> None:
    """After each test: those that it was lent are what they were.

    Raises:
        AssertionError: It has changed one, which other tests would be lent.
    """
    changed = [model for model, state in _lent.items() if _state(model) != state]
    _lent.clear()
    if changed:
        _made.cache_clear()
    assert not changed, "the test has changed the model that tests share"


@functools.cache
def _made(case: Case, dtype: torch.dtype) -> LanguageModel:
    return case.model(dtype)


def _state(model: LanguageModel) -> list[Any]:
    """State that changes with the model: torch counts the changes of every tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    return [model.training, *((t._version, t.grad is None, t.dtype) for t in tensors)]


@torch.no_grad()
def randomise(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Every parameter random: no zero-initialised bias hides a term."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        gain = name.endswith("weight") and "norm" in name
        parameter.copy_(1 + 0.3 * noise if gain else 0.4 * noise)
    return model


def transformer_xl(embedding: EmbeddingConfig | None = None, **options: Any) -> Case:
    """Transformer-XL: only a fixed span makes reading independent of cuts."""
    config = TransformerXLConfig(**SMALL | {"memory_length": 5} | options)
    fixed = config.attention_span == "fixed"
    reach = config.memory_length - fixed
    return Case(
        config,
        cut_invariant=fixed,
        # Layer 0 remembers the embeddings; what deeper layers remember was computed inside cuts.
        layout=lambda m: [m.tokens_seen, m.length, m.hidden[:, 0]],
        embedding=embedding or EmbeddingConfig(),
        forgets_segments=reach == 0,
        sees_itself_only=fixed and reach == 0,
    )


def compressive(embedding: EmbeddingConfig | None = None, **options: Any) -> Case:
    """Compressive Transformer: where slots stand depends on the number of tokens only."""
    sizes = {"memory_length": 5, "compressed_length": 3, "compression_rate": 2}
    config = CompressiveConfig(**SMALL | sizes | options)
    return Case(
        config,
        cut_invariant=False,
        # What is compressed of the embeddings is the same, too, unless attention chooses it.
        layout=lambda m: [
            m.tokens_seen,
            m.length,
            m.compressed_length,
            m.hidden[:, 0],
            m.compressed.ne(0).any(-1).double()
            if config.compression == "most-used"
            else m.compressed[:, 0],
        ],
        embedding=embedding or EmbeddingConfig(),
        cut_fields=("compressed",),
    )


def whole(kind: Any, embedding: EmbeddingConfig | None = None, **options: Any) -> Case:
    """An architecture whose reading no cut changes."""
    return Case(kind(**SMALL | options), True, embedding=embedding or EmbeddingConfig())


fast_weights = functools.partial(whole, FastWeightsConfig, chunk_size=4)
gated_delta_net = functools.partial(whole, GatedDeltaNetConfig, chunk_size=4)
infini = functools.partial(whole, InfiniConfig, block_length=4)
kda = functools.partial(whole, KDAConfig, chunk_size=4)
rmt = functools.partial(whole, RMTConfig, block_length=4, memory_tokens=2, d_memory=3)
mamba_2 = functools.partial(whole, Mamba2Config, chunk_size=4, d_state=6)
gla = functools.partial(whole, GLAConfig, chunk_size=4)
delta_product = functools.partial(whole, DeltaProductConfig, chunk_size=4)
gated_delta_net_2 = functools.partial(whole, GatedDeltaNet2Config, chunk_size=4)
ranks = {"decay_rank": 3, "rate_rank": 3, "value_rank": 2, "gate_rank": 3}
rwkv_7 = functools.partial(whole, RWKV7Config, chunk_size=4, **ranks)
feedback = functools.partial(whole, FeedbackConfig, memory_length=5)

ADAPTIVE = EmbeddingConfig(cutoffs=(3, 6), div_val=2, d_embed=6)
UNTIED = EmbeddingConfig(tie=False, scale=False)

CASES: dict[str, Case] = {
    "xl-segment": transformer_xl(),
    "xl-segment-post": transformer_xl(normalisation="post", activation="gelu"),
    "xl-segment-learned": transformer_xl(UNTIED, positions="learned", max_distance=40),
    "xl-segment-no-memory": transformer_xl(memory_length=0, tie_position_biases=True),
    "xl-segment-clamp": transformer_xl(ADAPTIVE, clamp_length=3, attention_bias=True, d_head=3),
    "xl-segment-gated": transformer_xl(gating="gru"),
    "xl-fixed": transformer_xl(attention_span="fixed"),
    "xl-fixed-learned": transformer_xl(
        attention_span="fixed", positions="learned", max_distance=12
    ),
    "xl-fixed-clamp": transformer_xl(
        UNTIED, attention_span="fixed", clamp_length=2, final_norm=False, normalisation="post"
    ),
    "xl-fixed-one": transformer_xl(n_layers=1, attention_span="fixed", memory_length=1),
    "compressive": compressive(),
    "compressive-mean-post": compressive(
        compression="mean", normalisation="post", auxiliary_loss="none", activation="gelu"
    ),
    "compressive-max-learned": compressive(
        UNTIED, compression="max", positions="learned", max_distance=48, compression_rate=4
    ),
    "compressive-dilated": compressive(
        compression="dilated-convolution", compression_rate=3, auxiliary_loss="auto-encoding"
    ),
    "compressive-most-used": compressive(
        compression="most-used", memory_length=4, attention_bias=True, auxiliary_loss="none"
    ),
    "compressive-shortest": compressive(
        ADAPTIVE, memory_length=2, compression_rate=3, compressed_length=1, task_gradient=True
    ),
    "compressive-none": compressive(compressed_length=0, final_norm=False),
    "compressive-fixed-gated": compressive(
        attention_span="fixed", clamp_length=4, tie_position_biases=True, d_head=3, gating="gru"
    ),
    "fast-delta": fast_weights(),
    "fast-delta-dpfp-3": fast_weights(
        UNTIED, nu=3, recompute=True, final_norm=False, norm="feed-forward"
    ),
    "fast-delta-elu-attention": fast_weights(feature_map="elu", normalisation="attention"),
    "fast-delta-favor": fast_weights(feature_map="favor", favor_features=6, d_head=3),
    "fast-delta-softmax": fast_weights(
        ADAPTIVE, feature_map="softmax", normalisation="none", positions="sinusoidal"
    ),
    "fast-sum": fast_weights(rule="sum", activation="gelu", norm="post"),
    "fast-sum-attention": fast_weights(rule="sum", feature_map="elu", normalisation="attention"),
    "fast-outer-product": fast_weights(
        rule="outer-product", feature_map="identity", normalisation="none"
    ),
    "fast-outer-product-identity": fast_weights(
        rule="outer-product",
        feature_map="identity",
        normalisation="none",
        outer_activation="identity",
    ),
    "gated": gated_delta_net(),
    "gated-shared-keys": gated_delta_net(
        n_value_heads=4, d_value=5, negative_eigenvalues=True, recompute=True
    ),
    "gated-one-tap": gated_delta_net(ADAPTIVE, convolution=1, activation="gelu", n_layers=1),
    "kda": kda(),
    "kda-wide-values": kda(UNTIED, d_value=5, negative_eigenvalues=True, recompute=True),
    "mamba": mamba_2(),
    "mamba-alone": mamba_2(
        ADAPTIVE, n_heads=4, n_groups=2, d_head=3, d_ff=0, convolution=2, recompute=True
    ),
    "gla": gla(),
    "gla-retention": gla(UNTIED, decay="retention", d_head=3, d_value=5, recompute=True),
    "product": delta_product(),
    "product-of-three": delta_product(
        UNTIED, n_householder=3, decay=False, d_value=5, convolution=2, recompute=True
    ),
    "gated2": gated_delta_net_2(d_value=5),
    "rwkv": rwkv_7(n_layers=3),
    "rwkv-one-layer": rwkv_7(ADAPTIVE, n_layers=1, d_head=3, activation="gelu", recompute=True),
    "feedback": feedback(),
    "feedback-per-layer": feedback(ADAPTIVE, projections="per-layer", attention_bias=True),
    "feedback-no-memory-norm": feedback(
        UNTIED, memory_norm=False, activation="gelu", value_bias=False, attention_bias=True
    ),
    "feedback-mean-post": feedback(memory_vector="mean", normalisation="post"),
    "feedback-last-post": feedback(
        memory_vector="last",
        normalisation="post",
        projections="per-layer",
        attention_bias=True,
        adaptive_span=1e-3,
        span_ramp=2,
    ),
    "feedback-long-table": feedback(max_distance=9, d_head=3, n_layers=3, final_norm=False),
    "feedback-shortest": feedback(n_layers=1, memory_length=2),
    "infini": infini(),
    "infini-delta": infini(UNTIED, update="delta", block_length=3, activation="gelu"),
    "infini-one": infini(ADAPTIVE, block_length=1, d_head=6, n_layers=1),
    "rmt": rmt(),
    "rmt-associative": rmt(
        associative=True, block_length=5, memory_tokens=5, d_memory=8, activation="gelu"
    ),
    "rmt-lstm": rmt(UNTIED, backbone="lstm"),
    "rmt-one": rmt(ADAPTIVE, backbone="transformer-xl", block_length=1, memory_tokens=1),
    "lstm": Case(LSTMConfig(n_layers=2, d_model=8), cut_invariant=True),
    "transformer": Case(
        TransformerConfig(**SMALL),
        cut_invariant=False,
        forgets_segments=True,
    ),
}


ONE_OF_EACH = {
    name: next(case for case, of in CASES.items() if type(of.backbone) is kind)
    for name, kind in MODELS.items()
}
"""The first case of each architecture."""


def implementations(backbone: Backbone[Any]) -> list[str]:
    """Implementations that can run here, in training, with the backbone's options and type."""
    nothing = next(backbone.parameters()).detach().new_zeros(1, 1, backbone.config.d_model)
    found = []
    for name in backbone.implementations:
        try:
            backbone(nothing.requires_grad_(torch.is_grad_enabled()), implementation=name)
            found.append(name)
        except MemspanError:
            pass
    return found
