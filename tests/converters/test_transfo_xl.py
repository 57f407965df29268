"""Folders of transformers' Transformer-XL: genuine ones, and options that those lack."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transfo_xl_reference import log_probabilities

import memspan
from golden import Golden, assert_same, folder, parameters
from memspan.errors import MemspanError
from readings import read
from recorded_models import model_of
from transfo_xl_folder import OPTIONS, random_tensors, write

CASES: dict[str, dict[str, Any]] = {
    "plain": {"cutoffs": [], "tie_projs": [False]},
    "half-width": {"cutoffs": [], "tie_projs": [True], "d_embed": 6},
    "div 2, other ties": {"div_val": 2, "tie_projs": [True, False, True]},
    "div 4, no ties": {"div_val": 2, "tie_projs": [False] * 3, "tie_word_embeddings": False},
    "shared biases": {"untie_r": False, "pre_lnorm": True, "d_embed": 4, "tie_projs": [True] * 3},
    "large epsilon": {"layer_norm_epsilon": 0.3, "clamp_len": 2, "same_length": True},
    "div 2, no cutoffs": {"div_val": 2, "cutoffs": [], "tie_projs": [False], "d_embed": 10},
    "no memory": {"mem_len": 0, "tie_word_embeddings": False},
}


@pytest.mark.golden
@pytest.mark.parametrize("path", parameters("hf_transfo_xl"))
def test_converts_recorded_models(path: Path, tmp_path: Path) -> None:
    """The models whose outputs are compared in ``test_golden_transformer_xl.py``, from a folder made of
    the recorded tensors, and from the genuine one where that was kept."""
    expected, _ = model_of(Golden(path, torch.float32), tmp_path / "made")
    sources = [tmp_path / "made"]
    genuine = path.parent / f"pretrained_{path.stem}"
    if genuine.is_dir():
        sources += [shutil.copytree(genuine, tmp_path / name) for name in ("bin", "safe")]
        (sources[1] / "model.safetensors").unlink()
        (sources[2] / "pytorch_model.bin").unlink()
    for source in sources:
        run = memspan.load(memspan.convert(source, f"{source}-run"))
        options = expected.backbone.config
        assert replace(run.config.model, dropout=options.dropout) == options
        assert run.model.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize("case", CASES)
def test_options_are_converted(case: str, tmp_path: Path) -> None:
    """Options that the recorded models lack, against an implementation of the equations."""
    options = OPTIONS | CASES[case]
    tensors = random_tensors(options)
    run = memspan.load(memspan.convert(write(tmp_path / "in", options, tensors), tmp_path / "out"))
    tokens = [3, 19, 0, 7, 12, 5, 6, 11, 1, 18]
    for cut in (4, 7):
        wanted = log_probabilities(options, tensors, tokens, cut)
        ours, _ = read(run.model.double(), torch.tensor([tokens]), cut)
        assert_same(ours[0].log_softmax(-1), wanted, 1e-10, case)


def test_a_bare_config_means_what_transformers_says(source: Path, tmp_path: Path) -> None:
    """An option that is left out has transformers' default, and unties nothing."""
    left_out = ("tie_projs", "tie_word_embeddings", "layer_norm_epsilon", "attn_type", "untie_r")
    options = {name: value for name, value in OPTIONS.items() if name not in left_out}
    bare = write(tmp_path / "bare", options, random_tensors(OPTIONS))
    configs = [
        memspan.load(memspan.convert(found, tmp_path / f"{found.name}-run")).config
        for found in (bare, source)
    ]
    assert configs[0] == configs[1]


def test_reads_shards_and_other_precisions(source: Path, tmp_path: Path) -> None:
    """Weights in several files, in float16."""
    halves = {n: t.half() for n, t in random_tensors(OPTIONS).items()}
    whole = write(tmp_path / "whole", OPTIONS, halves)
    names = sorted(halves)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: halves[name].clone() for name in own}, source / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "pytorch_model.bin").unlink()
    one, two = (
        memspan.load(memspan.convert(found, tmp_path / f"{found.name}-run")).model
        for found in (whole, source)
    )
    assert one.fingerprint() == two.fingerprint()


def test_a_converted_run_evaluates_generates_and_trains(source: Path, tmp_path: Path) -> None:
    """It is scored, writes and is trained on, with another number of rows from its start only, and on
    records of one's own."""
    text = tmp_path / "text.jsonl"
    lines = [" ".join(f"w{(i * j) % 18}" for i in range(9)) for j in range(60)]
    text.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    folder = memspan.convert(source, tmp_path / "run")
    before = memspan.evaluate(folder, str(text), field="body", split="all")
    assert memspan.generate(folder, "w1 w2", tokens=3).text
    config = memspan.load(folder).config
    small = {"steps": 4, "batch_size": 2, "segment_length": 8, "sample_tokens": 0, "device": "cpu"}
    config = replace(
        config,
        data=replace(config.data, corpus=str(text), field="body", document_reset=True),
        optim=replace(config.optim, learning_rate=0.01, warmup_steps=0),
        train=replace(config.train, **small),
    )
    memspan.resume(folder, config=config)
    assert memspan.load(folder).step == 4
    assert memspan.evaluate(folder, split="all").nats < before.nats
    more = replace(config, train=replace(config.train, steps=5))
    with pytest.raises(MemspanError, match="cannot change from 2 to 3"):
        memspan.resume(folder, config=replace(more, train=replace(more.train, batch_size=3)))
    memspan.resume(folder, config=more)


@pytest.mark.golden
def test_reads_the_genuine_vocabulary(tmp_path: Path) -> None:
    """All three files of it, as words whose ids are the recorded ones."""
    genuine = [p.parent for p in (folder() / "hf_transfo_xl").glob("*/tokenizer_reference.json")]
    if not genuine:
        pytest.skip("no recorded vocabulary")
    for path in genuine:
        reference = json.loads((path / "tokenizer_reference.json").read_text())
        for name in ("vocab.pkl", "vocab.bin", "vocab_plain.pkl"):
            source = shutil.copytree(path, tmp_path / f"{path.name}-{name}")
            kept = (source / name).read_bytes()
            (source / "vocab.pkl").unlink()
            (source / "vocab.bin").unlink()
            (source / name.replace("_plain", "")).write_bytes(kept)
            tokenizer = memspan.load(memspan.convert(source, f"{source}-run")).tokenizer
            assert tokenizer.words == reference["idx2sym"]
            for example in reference["examples"]:
                text = " ".join(example["tokens"]) + "\n"
                assert tokenizer.encode(text.encode()).tolist() == example["ids_add_eos"]


def test_lower_case_and_no_vocabulary(source: Path, tmp_path: Path) -> None:
    """Text is lower-cased where the settings say so; without any tokeniser it is numbers."""
    (source / "tokenizer_config.json").write_text('{"lower_case": true}')
    run = memspan.load(memspan.convert(source, tmp_path / "lower"))
    assert run.tokenizer.encode(b"W3 <eos> W4\n").tolist() == [5, 0, 6, 0]
    (source / "tokenizer_config.json").unlink()
    (source / "vocab.pkl").unlink()
    run = memspan.load(memspan.convert(source, tmp_path / "numbers"))
    assert run.tokenizer.encode(b"3 0\n19").tolist() == [3, 0, 19]
    with pytest.raises(MemspanError, match="'20' is not in the vocabulary"):
        run.tokenizer.encode(b"20")
