"""Files of tensors are those of safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from memspan.errors import MemspanError
from memspan.files.tensors import TYPES, load_tensors, save_tensors


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tensors = {f"{number}/ä\\": torch.ones(3).to(dtype) for number, dtype in enumerate(TYPES)}
    tensors |= {"": torch.zeros(()), "none": torch.empty(0, 2), "b": torch.arange(6.0).view(2, 3)}
    save_tensors(path, tensors | {"c": tensors["b"].T}, {"step": '"ü\n'})
    assert load_tensors(path)[1]["step"] == '"ü\n'
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert path.read_bytes() == save(tensors | {"c": tensors["b"].T.contiguous()}, metadata)


def test_a_type_that_files_do_not_have(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("older")
    with pytest.raises(MemspanError, match=r"a is of type torch\.complex128"):
        save_tensors(tmp_path / "t", {"a": torch.zeros(2, dtype=torch.complex128)}, {})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]
