"""The presets of the papers: as many parameters as published, and a header that says what is known."""

from __future__ import annotations

import pytest
import torch

from memspan.models import LanguageModel
from memspan.runs.options import PRESETS, read_config

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
