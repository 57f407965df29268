"""Runs of labml_nn: folders of the recorded tensors, as labml writes them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

import memspan
from golden import Golden, parameters
from memspan.errors import MemspanError
from recorded_models import labml_run, labml_tensors, model_of

pytestmark = pytest.mark.golden
SETS = (
    *("labml_xl", "labml_compressive"),
    *("labml_feedback", "labml_feedback_kv", "labml_fast_weights"),
)
one_recorded = pytest.mark.parametrize("path", parameters("labml_xl")[:1])


@pytest.mark.parametrize("path", parameters(*SETS))
def test_recorded_models(path: Path, tmp_path: Path) -> None:
    """The models whose outputs are compared in ``test_golden_*.py``, with the tokens of their text."""
    g = Golden(path, torch.float32)
    source = tmp_path / "run"
    expected, _ = model_of(g, source)
    characters = [chr(ord("A") + i) for i in range(len(labml_tensors(g)["src_embed.weight"]))]
    (source / "text.txt").write_text("".join(reversed(characters)))
    run = memspan.load(memspan.convert(source, tmp_path / "out"))
    assert run.model.fingerprint() == expected.fingerprint()
    assert run.model.backbone.config == expected.backbone.config
    assert run.config.model.dropout == 0.1
    assert run.tokenizer.encode(b"BAC").tolist() == [1, 0, 2]
    assert run.tokenizer.decode([1, 0, 2]) == b"BAC"


@one_recorded
def test_other_forms(path: Path, tmp_path: Path) -> None:
    """One file of tensors; the latest of several; no text."""
    g = Golden(path)
    source = labml_run(tmp_path / "run", g)
    run = memspan.load(memspan.convert(source, tmp_path / "first"))
    assert run.tokenizer.encode(b"3 0").tolist() == [3, 0]
    later = source / "checkpoints" / "2000"
    later.mkdir()
    tensors = labml_tensors(g)
    torch.save({name: 2 * tensor for name, tensor in tensors.items()}, later / "model.pth")
    (later / "info.json").write_text('{"model": "model.pth"}')
    doubled = memspan.load(memspan.convert(source, tmp_path / "second")).model
    assert torch.equal(doubled.head.tables[0], 2 * tensors["generator.weight"])


BIAS = "checkpoints/300/model_generator.bias.npy"
OBJECTS = io.BytesIO()
np.save(OBJECTS, np.array([{}], dtype=object))
ONE_TENSOR = b'{"model": {"src_embed.weight": "model_src_embed.weight.npy"}}'
MISTAKES: dict[str, tuple[str, bytes | None, str]] = {
    "no options": ("configs.yaml", None, "cannot read .*configs.yaml"),
    "no memory length": ("configs.yaml", b"seq_len:\n  computed: 8\n", "has no mem_len"),
    "an array missing": (BIAS, None, "cannot read"),
    "an array of objects": (
        BIAS,
        OBJECTS.getvalue(),
        r"not an array .*Python objects in dtype",
    ),
    "another model": ("checkpoints/300/info.json", ONE_TENSOR, "is not of labml_nn's"),
    "another text": ("text.txt", b"abc", r"3 different characters, and the model \d+ tokens"),
}


@one_recorded
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, path: Path, tmp_path: Path) -> None:
    source = labml_run(tmp_path / "run", Golden(path))
    name, content, line = MISTAKES[mistake]
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(content)
    with pytest.raises(MemspanError, match=line):
        memspan.convert(source, tmp_path / "out", kind="labml")
    assert not (tmp_path / "out").exists()
