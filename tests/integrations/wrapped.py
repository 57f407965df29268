"""The tests' models as those of transformers."""

from __future__ import annotations

import dataclasses
import functools

import torch

from architectures import CASES, ONE_OF_EACH, VOCABULARY, Case
from memspan.integrations.transformers import MemspanConfig, MemspanForCausalLM
from memspan.models.registry import MODELS

ONE_EACH = {name: CASES[first] for name, first in ONE_OF_EACH.items()}
"""The first case of every architecture."""


def config_of(case: Case, **options: object) -> MemspanConfig:
    name = next(n for n, kind in MODELS.items() if isinstance(case.backbone, kind))
    return MemspanConfig(
        architecture=name,
        model=dataclasses.asdict(case.backbone),
        embedding=dataclasses.asdict(case.embedding),
        vocab_size=VOCABULARY,
        padding_id=VOCABULARY,
        **options,
    )


def wrap(case: Case, **options: object) -> MemspanForCausalLM:
    """A model of the case's weights, in float64."""
    model = MemspanForCausalLM(config_of(case, **options)).to(torch.float64).eval()
    model.model.load_state_dict(case.shared_model().state_dict())
    return model


@functools.cache
def wrapped(case: Case) -> MemspanForCausalLM:
    """One for all tests that do not change it."""
    return wrap(case)
