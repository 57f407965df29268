"""Initial parameters: sizes of activations that do not depend on the width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from architectures import CASES, Case
from memspan.errors import MemspanError
from memspan.models import LanguageModel, LSTMConfig
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights import model as fast_weights
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.initialisation import FACTORS, initialise, kind
from memspan.models.transformer_xl.config import TransformerXLConfig

NAMES = ("xl-segment-learned", "xl-segment-clamp", "compressive", "feedback", "fast-delta")
some_cases = pytest.mark.parametrize("case", [CASES[n] for n in NAMES], ids=NAMES)
BACKBONES = (TransformerXLConfig, CompressiveConfig, FeedbackConfig, FastWeightsConfig)


def stream(config: Any) -> float:
    """Root mean square of what the last layer's normalisation is given."""
    torch.manual_seed(0)
    model = LanguageModel(50, config)
    seen = []
    model.backbone.final_norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        model(torch.randint(50, (4, 16)), implementation="reference")
    return float(seen[0].square().mean().sqrt())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_activations_do_not_depend_on_the_width(backbone: Any) -> None:
    def ratio(scheme: str) -> float:
        sizes = {"n_layers": 2, "n_heads": 2, "initialisation": scheme}
        wide, narrow = (stream(backbone(**sizes, d_model=d, d_ff=4 * d)) for d in (256, 64))
        return wide / narrow

    assert ratio("scaled") == pytest.approx(1, rel=0.2)
    assert ratio("papers") > 1.5


@some_cases
def test_every_parameter_has_its_scale(case: Case) -> None:
    torch.manual_seed(0)
    model = LanguageModel(50, case.backbone, case.embedding)
    own = fast_weights.FACTORS if isinstance(case.backbone, FastWeightsConfig) else {}
    for name, parameter in model.named_parameters():
        if "compression" in name or parameter.dim() < 2 or parameter.numel() < 60:
            continue
        if kind(name) == "bias":
            assert not parameter.any(), name
            continue
        of_kind = kind(name)
        terms = parameter.shape[-1]
        terms *= {"residual": 2 * case.backbone.n_layers, "position": 1 / 2}.get(of_kind, 1)
        terms = 1 if of_kind.startswith("position-") else terms
        found = parameter.std().item() * math.sqrt(terms)
        assert found == pytest.approx((FACTORS | own)[of_kind], rel=0.3, abs=1e-9), name


@some_cases
def test_papers_scheme_is_one_scale_for_all(case: Case) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([LanguageModel(50, case.backbone, case.embedding)])
    initialise(model, "papers")
    matrices = [p.flatten() for p in model.parameters() if p.dim() >= 2]
    assert torch.cat(matrices).std().item() == pytest.approx(0.02, rel=0.05)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(MemspanError, match="use scaled or papers"):
        initialise(torch.nn.Linear(2, 2), "xavier")  # type: ignore[arg-type]
    with pytest.raises(MemspanError, match="initialisation"):
        TransformerXLConfig(initialisation="xavier")  # type: ignore[arg-type]


def test_forget_gates_of_an_lstm_begin_open() -> None:
    for scheme, forget in (("scaled", 1), ("papers", 0)):
        model: Any = LSTMConfig(n_layers=1, d_model=2, initialisation=scheme).build()
        assert model.layers[0].bias_ih_l0.tolist() == [0, 0, forget, forget, 0, 0, 0, 0]


@pytest.mark.parametrize("n_layers", [2, 8])
def test_memory_vectors_of_feedback_begin_as_embeddings(n_layers: int) -> None:
    for scheme, share in (("scaled", 10 / 11), ("papers", 1 / (n_layers + 1))):
        config = FeedbackConfig(n_layers=n_layers, d_model=8, n_heads=2, initialisation=scheme)
        assert config.build().mix()[0].item() == pytest.approx(share)
