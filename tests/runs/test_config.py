"""Options made in Python are checked as on the command line; the papers' presets are as published."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import numpy as np
import pytest
import torch

from memspan.errors import MemspanError
from memspan.lab.runs.options import PRESETS, RunConfig, read_config
from memspan.lab.sampling import Sampling
from memspan.lab.training.options import OptimConfig, TrainConfig
from memspan.models import LanguageModel, registry
from memspan.models.options import BackboneConfig
from memspan.models.registry import MODELS

HINTS = typing.get_type_hints(RunConfig).values()
SECTIONS = [kind for kind in HINTS if dataclasses.is_dataclass(kind)]
CONFIGS: list[Any] = [*MODELS.values(), *SECTIONS, Sampling]
OPTIONS = [(kind, field.name) for kind in CONFIGS for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    ("kind", "name"), OPTIONS, ids=[f"{kind.__name__}-{name}" for kind, name in OPTIONS]
)
def test_an_option_of_another_type_is_refused(kind: Any, name: str) -> None:
    """Wrong values for every option: those that none takes, then those outside its own type."""
    default = getattr(kind(), name)
    hint = str(typing.get_type_hints(kind)[name])
    wrong: list[Any] = [b"4", float("nan"), float("inf"), 10**400, ["4"], {}, np.ones(2)]
    others = {"4": "str", "rope": "str", None: "None", True: "bool", 2.5: "float"}
    wrong += [value for value, kind_of in others.items() if kind_of not in hint]
    for value in wrong:
        with pytest.raises(MemspanError, match=rf"^{name} must be ") as caught:
            kind(**{name: value})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200
    assert getattr(kind(**{name: default}), name) == default


XL = MODELS["transformer-xl"]
COMPRESSIVE = MODELS["compressive"]
GROWING = {"segment_length": 10, "first_segment_length": 2, "curriculum_steps": 12}
WAYS = "convolution, mean, max, dilated-convolution or most-used"


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (XL, {"activation": "swish"}, "^activation must be relu or gelu, not 'swish'$"),
        (XL, {"d_head": 2.5}, "^d_head must be an integer or None, not 2.5$"),
        (XL, {"final_norm": 1}, "^final_norm must be True or False, not 1$"),
        (COMPRESSIVE, {"dropout": None}, "^dropout must be a finite number, not None$"),
        (COMPRESSIVE, {"compression": "svd"}, f"^compression must be {WAYS}, not 'svd'$"),
        (OptimConfig, {"decay_steps": 5}, "is for the schedule warmup-stable-decay"),
        (OptimConfig, {"decay_steps": 0}, "decay_steps must be at least 1, not 0"),
        (TrainConfig, GROWING | {"first_segment_length": 11}, "over segment_length"),
        (TrainConfig, GROWING | {"first_segment_length": 0}, "at least 1"),
        (TrainConfig, GROWING | {"first_segment_length": None}, "set both"),
        (TrainConfig, GROWING | {"curriculum_steps": 0}, "set both"),
        (TrainConfig, {"accumulate_from": 5}, "no effect without accumulate_later: set both"),
        (TrainConfig, {"accumulate": 2, "gradient_segments": 3}, "is over accumulate 2"),
        (TrainConfig, {"early_stopping_patience": 0}, "must be at least 1"),
        (TrainConfig, {"early_stopping_threshold": 0.1}, "for early_stopping_patience: set both"),
        (
            TrainConfig,
            {"early_stopping_patience": 1, "evaluate_every": 0},
            "evaluate_every 0 makes",
        ),
        (
            TrainConfig,
            {"precision": "bfloat16", "matmul_precision": "high"},
            "use precision float32",
        ),
        (RunConfig, {"model": XL(), "train": {}}, "train must be a TrainConfig"),
        (RunConfig, {"model": XL(), "architecture": "gpt"}, "must be transformer-xl, compressive"),
        (RunConfig, {"model": XL(), "architecture": "lstm"}, "set architecture=.transformer-xl."),
    ],
)
def test_options_that_are_refused(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(MemspanError, match=says):
        kind(**given)


PAPERS = [name for name in PRESETS if name.startswith("papers/")]
PUBLISHED = {
    "enwik8-12l": 41e6,
    "enwik8-18l": 88e6,
    "enwik8-24l": 277e6,
    "text8": 277e6,
    "wikitext-103": 151e6,
    "enwik8-compressive": 277e6,
}
"""Parameters. The Compressive Transformer's are those without compression functions."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    config = read_config(PRESETS[f"papers/{name}"])
    with torch.device("meta"):
        model = LanguageModel(config.data.vocab_size or 256, config.model, config.embedding)
    apart = sum(p.numel() for p in model.backbone.auxiliary_parameters())
    count = sum(p.numel() for p in model.parameters()) - apart
    assert count == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", PAPERS)
def test_headers_say_what_is_known(name: str) -> None:
    text = PRESETS[name].read_text()
    for what in ("Published", "Published hardware", "Options", "Differs", "Not reproduced here"):
        assert f"\n# {what}:" in text
    # So that a dry run needs no text.
    data = read_config(PRESETS[name]).data
    assert data.tokenizer == "bytes" or data.vocab_size is not None


def test_a_cell_that_registers_an_architecture_may_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "MODELS", dict(MODELS))

    def cell(name: str = "Own") -> type[BackboneConfig]:
        made = type(name, (BackboneConfig,), {"__module__": "__main__", "__qualname__": name})
        registry.register("own", made)
        return made

    cell()
    latest = cell()
    assert registry.MODELS["own"] is latest
    with pytest.raises(MemspanError, match="there is an architecture 'own' already"):
        cell("Other")
    with pytest.raises(MemspanError, match="there is an architecture 'lstm' already"):
        registry.register("lstm", latest)
    assert registry.MODELS["own"] is latest
