"""Runs of labml_nn: folders of the recorded tensors, as labml writes them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import memspan
from golden import Golden, assert_same, parameters
from memspan.errors import MemspanError

SETS = (
    *("labml_xl", "labml_compressive"),
    *("labml_feedback", "labml_feedback_kv", "labml_fast_weights"),
)
CONFIG = """\
{name}:
  computed: {value}
  is_explicitly_specified: true
  is_hyperparam: null
  name: {name}
  options:
  - {name}_option
  order: 3
  type: <class 'int'>
  value: 0
"""
"""An entry of ``configs.yaml``, as PyYAML writes it."""


def language_model(g: Golden) -> dict[str, Tensor]:
    """The tensors of their ``AutoregressiveModel``; some sets recorded its transformer only."""
    tensors = dict(g.named("param."))
    if "src_embed.weight" in tensors:
        return tensors
    made = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    shape = (7, g.config["d_model"])
    made |= {"src_embed.weight": torch.randn(shape), "generator.weight": torch.randn(shape)}
    return made | {"generator.bias": torch.zeros(7)}


def write(folder: Path, g: Golden, step: int = 300) -> Path:
    """A run's folder, with a tensor in each file."""
    at = folder / "checkpoints" / str(step)
    at.mkdir(parents=True)
    files = {}
    for name, tensor in language_model(g).items():
        files[name] = f"model_{name}.npy"
        np.save(at / files[name], tensor.numpy())
    (at / "info.json").write_text(json.dumps({"model": files, "accuracy": {}}))
    values = {"seq_len": 12, "dropout": 0.1, "optimizer.learning_rate": 2.5e-4, "device": "cpu"}
    values |= {n: v for n, v in g.config.items() if isinstance(v, int)}
    entries = [CONFIG.format(name=name, value=value) for name, value in sorted(values.items())]
    (folder / "configs.yaml").write_text("".join(entries))
    return folder


def text_of(n_tokens: int) -> str:
    return "".join(chr(ord("A") + i) for i in reversed(range(n_tokens)))


@pytest.mark.golden
@pytest.mark.parametrize("path", parameters(*SETS))
def test_recorded_outputs(path: Path, tmp_path: Path) -> None:
    g = Golden(path)
    source = write(tmp_path / "run", g)
    n_tokens = len(language_model(g)["src_embed.weight"])
    (source / "text.txt").write_text(text_of(n_tokens))
    run = memspan.load(memspan.convert(source, tmp_path / "out"))
    assert run.config.model.dropout == 0.1
    assert run.tokenizer.encode(b"BAC").tolist() == [1, 0, 2]
    assert run.tokenizer.decode([1, 0, 2]) == b"BAC"
    model, memory = run.model.double(), None
    if "in.x" in g:
        x, whole = g.input("x", torch.float64).transpose(0, 1), "f64.out" in g
        for i, segment in enumerate([x] if whole else x.split(g.config["segments"], 1)):
            output = model.backbone(segment, memory)
            memory = output.memory
            wanted = g["f64.out" if whole else f"f64.seg{i}.tokenwise_out"]
            assert_same(output.hidden.transpose(0, 1), wanted, 1e-9, f"seg{i}")
        return
    for i in g.segments:
        output = model(g.input(f"seg{i}.tokens", torch.int64).t(), memory)
        memory = output.memory
        assert_same(output.logits.transpose(0, 1), g[f"f64.seg{i}.logits"], 1e-9, f"seg{i}")


@pytest.fixture
def recorded() -> Golden:
    (path, *_) = parameters("labml_xl")
    if path.values[0] is None:
        pytest.skip("no recorded tensors")
    return Golden(path.values[0])


@pytest.mark.golden
def test_other_forms(recorded: Golden, tmp_path: Path) -> None:
    """One file of tensors; the latest of several; no text."""
    source = write(tmp_path / "run", recorded, step=1000)
    run = memspan.load(memspan.convert(source, tmp_path / "first"))
    assert run.tokenizer.encode(b"3 0").tolist() == [3, 0]
    later = source / "checkpoints" / "2000"
    later.mkdir()
    tensors = language_model(recorded)
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
    "an array of objects": (BIAS, OBJECTS.getvalue(), "damaged or not an array"),
    "another model": ("checkpoints/300/info.json", ONE_TENSOR, "is not of labml_nn's"),
    "another text": ("text.txt", b"abc", "3 different characters, and the model 40 tokens"),
}


@pytest.mark.golden
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, recorded: Golden, tmp_path: Path) -> None:
    source = write(tmp_path / "run", recorded)
    name, content, line = MISTAKES[mistake]
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(content)
    with pytest.raises(MemspanError, match=line):
        memspan.convert(source, tmp_path / "out", kind="labml")
    assert not (tmp_path / "out").exists()
