"""Vectors for other runtimes, written by the readable path: the fast ones compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import vectors
from golden import assert_same
from memspan.models import LanguageModel
from memspan.models.registry import MODELS


@pytest.mark.parametrize("name", vectors.CASES)
def test_written_vectors_are_what_fast_paths_compute(name: str, tmp_path: Path) -> None:
    vectors.write(name, tmp_path)
    written = load_file(tmp_path / f"{name}.safetensors")
    description = json.loads((tmp_path / f"{name}.json").read_text())
    config = MODELS[description["architecture"]](**description["options"])
    model = LanguageModel(description["vocabulary"], config).eval().double()
    parameters = {
        key.removeprefix("param."): t for key, t in written.items() if key.startswith("param.")
    }
    model.load_state_dict(parameters, strict=False)
    assert parameters.keys() == dict(model.named_parameters()).keys()
    found = vectors.computed(model, None)
    expected = {key.removeprefix("f64."): t for key, t in written.items() if key.startswith("f64.")}
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        if tensor.is_floating_point():
            assert_same(tensor, expected[key], 1e-9, key)
        else:
            assert tensor.equal(expected[key]), key
