"""Checkpoints of the authors' PyTorch code: model objects of the recorded tensors, and state dicts."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import memspan
from golden import Golden, parameters
from memspan.errors import MemspanError
from memspan.lab.converters import authors
from recorded_models import model_of
from transfo_xl_folder import OPTIONS, random_tensors, vocabulary

Make = Callable[..., Any]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes objects of the classes that their checkpoints name, which exist here only while saving."""

    def make(path: str, parent: type = object, **attributes: Any) -> Any:
        module, _, name = path.rpartition(".")
        for home in {module, module.partition(".")[0]} - set(sys.modules):
            monkeypatch.setitem(sys.modules, home, ModuleType(home))
        kind = getattr(sys.modules[module], name, None) or type(name, (parent,), {})
        kind.__module__ = module
        monkeypatch.setattr(sys.modules[module], name, kind, raising=False)
        made = kind()
        for attribute, value in attributes.items():
            setattr(made, attribute, value)
        return made

    return make


def model_object(path: Path, theirs: Make) -> nn.Module:
    """A ``MemTransformerLM`` with the recorded options and tensors; those that are tied are one."""
    g = Golden(path, torch.float32)
    c = g.config
    made = {}
    leaves = g.leaves() | {"pos_emb.inv_freq": g["f64.buf.pos_emb.inv_freq"].float()}
    kinds = {
        "word_emb": "mem_transformer.AdaptiveEmbedding",
        "crit": "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax",
    }
    model = theirs("mem_transformer.MemTransformerLM", nn.Module)
    for name, leaf in leaves.items():
        *parts, last = name.split(".")
        module = model
        for part in parts:
            if part not in module._modules:
                kind = kinds.get(part)
                module.add_module(part, theirs(kind, nn.Module) if kind else nn.ModuleList())
            module = module._modules[part]
        parameter = made.setdefault(id(leaf), nn.Parameter(leaf.detach()))
        module.register_parameter(last, parameter)
    kept = ("n_token", "d_embed", "d_model", "n_head", "d_head", "n_layer", "tgt_len", "mem_len")
    for name in (*kept, "ext_len", "attn_type", "same_length", "clamp_len"):
        setattr(model, name, c[name])
    model.word_emb.cutoffs = c["cutoffs"] + [c["n_token"]]
    model.word_emb.div_val = c["div_val"]
    for layer in model.layers:
        layer.dec_attn.pre_lnorm = c["pre_lnorm"]
    model.add_module("drop", nn.Dropout(0.1))
    return model


@pytest.mark.golden
@pytest.mark.parametrize("form", ["object", "old object", "state dict", "wrapped"])
@pytest.mark.parametrize("path", parameters("kimi_xl"))
def test_converts_recorded_models(
    path: Path, form: str, tmp_path: Path, theirs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = Golden(path)
    source = tmp_path / "source"
    source.mkdir()
    zipped = form != "old object"
    vocab = theirs("utils.vocabulary.Vocab", **vocabulary(g.config["n_token"]))
    corpus = theirs("data_utils.Corpus", dataset="wt103", vocab=vocab, train=torch.arange(9))
    torch.save(corpus, source / "cache.pt", _use_new_zipfile_serialization=zipped)
    if "object" in form:
        model = model_object(path, theirs)
        with warnings.catch_warnings():
            # Their classes have no source here.
            warnings.simplefilter("ignore")
            torch.save(model, source / "model.pt", _use_new_zipfile_serialization=zipped)
    elif form == "wrapped":
        state = {f"module.{name}": tensor for name, tensor in g.named("param.")}
        wrapped = {"model_state": state, "model_config": g.config, "epoch": 3}
        torch.save(wrapped, source / "model.pt")
    else:
        torch.save(dict(g.named("param.")), source / "model_state.pt")
        args = {name: value for name, value in g.config.items() if name != "cutoffs"}
        if g.config["div_val"] == 1:
            args["dataset"] = "wt103"
            monkeypatch.setitem(authors.CUTOFFS, "wt103", g.config["cutoffs"])
        (source / "args.json").write_text(json.dumps(args | {"tie_projs": [True]}))
    run = memspan.load(memspan.convert(source, tmp_path / "run"))
    assert run.tokenizer.encode(b"w3 w4\nnobody\n").tolist() == [5, 6, 0, 1, 0]
    expected, _ = model_of(Golden(path, torch.float32), tmp_path / "recorded")
    dropout = 0.1 if "object" in form else 0.0
    assert run.config.model == replace(expected.backbone.config, dropout=dropout)
    assert run.model.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("words", "corpus", "text", "ids"),
    [
        (["_", "e", "t", "a"], "text8", b"a tee", [3, 0, 2, 1, 1]),
        (["101", "32", "200"], "enwik8", b"e\n\xc8 e", [0, 2, 1, 0]),
    ],
)
def test_reads_the_text_of_character_data_sets(
    words: list[str], corpus: str, text: bytes, ids: list[int], tmp_path: Path
) -> None:
    """Their scripts write each as a word; here the text itself is read."""
    c = {**OPTIONS, "vocab_size": len(words), "cutoffs": [], "untie_r": False, "dataset": corpus}
    tensors = random_tensors(c).items()
    torch.save({n.removeprefix("transformer."): t for n, t in tensors}, tmp_path / "model_state.pt")
    (tmp_path / "args.json").write_text(json.dumps(c))
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    folder = memspan.convert(tmp_path, tmp_path / "run")
    run = memspan.load(folder)
    assert run.config.data.corpus == corpus
    assert run.tokenizer.encode(text).tolist() == ids
    assert run.tokenizer.decode(ids) == text.replace(b"\n", b"")
    with pytest.raises(MemspanError, match="is not in the vocabulary"):
        run.tokenizer.encode(b"xylophone")
    # Neither has a line break to begin with.
    assert len(memspan.generate(folder, tokens=3).tokens[0]) == 3


@pytest.mark.golden
@pytest.mark.parametrize("path", parameters("kimi_xl")[:1])
def test_mistakes_are_refused(path: Path, tmp_path: Path, theirs: Make) -> None:
    g = Golden(path)
    file = tmp_path / "model.pt"

    def refused(value: Any, line: str) -> None:
        torch.save(value, file)
        with pytest.raises(MemspanError, match=line):
            memspan.convert(tmp_path, tmp_path / "run")

    state = dict(g.named("param."))
    refused(state, "put args.json next to it")
    refused({"model_state": {}, "args": argparse.Namespace()}, "has no r_w_bias of 2 dimensions")
    refused(theirs("elsewhere.Model", nn.Module), "holds elsewhere.Model, .* could run a program")
    model = model_object(path, theirs)
    # A module inside itself, which has no end.
    model.add_module("again", model)
    torch.save(model, file)
    assert memspan.convert(tmp_path, tmp_path / "run")
