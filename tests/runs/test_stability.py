"""Run folders and memory files of earlier versions load for good: see ``tests/saved/0.1.0/README.md``.

The numbers were recorded by the version that wrote the files. If one of these tests fails, the code is
wrong, not the recording.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import memspan
from memspan.errors import MemspanError
from memspan.files.tensors import TYPES, load_tensors, save_tensors
from memspan.lab.cli import main
from memspan.lab.runs import checkpoints
from memspan.lab.training import metrics

SAVED = Path(__file__).parents[1] / "saved" / "0.1.0"
TEXT = b"Memory is what remains of what was read."
EVALUATED = {
    "transformer-xl": 3.2944908905774355,
    "compressive": 3.3256279192864895,
    "feedback": 3.227963075041771,
    "fast-weights": 3.0773491747677326,
    "shared": 3.0953825917094946,
}
"""Nats per token of each run, over the first 64 tokens of ``text.txt``."""
READ_ON = {
    "transformer-xl": 3.0468766689300537,
    "compressive": 3.065037250518799,
    "feedback": 3.0405385494232178,
    "fast-weights": 3.0256295204162598,
}
"""Nats per token of :data:`TEXT`, read on from each saved memory."""
FINGERPRINTS = {
    "transformer-xl": "eb903ab8d5b693010e18803ed80b862213ac9e39702d8dfd96d3493b4a346a3b",
    "compressive": "9d3deaa84cb8f6e0d1980af906c386e7cb4f2a4d5daef4976111a8041fd7d214",
    "feedback": "293b9afdb642bed2cd235f76c02f3ccfb116b500082b3baa58204d1d1dbfafe3",
    "fast-weights": "da86f14106509be3d8ad977ad514b11cd4855727ab606426fd2c61580dc059f6",
}
"""Of each run's model, as later versions make them. Its ``config.toml`` gives options that are at their
defaults, too: a default that changes would change the fingerprint."""
RESUMED = {"compressive": (94, 2.9083970302343367), "shared": (79, 2.691863857805729)}
"""Last step and its validation score, nats per token, after training a few steps more."""
CLOSE = {"abs": 1e-4}


@pytest.fixture
def folder(own_folders: Path) -> Path:
    """A copy of the saved files: nothing may be written beside the originals."""
    return shutil.copytree(SAVED, own_folders, dirs_exist_ok=True)


@pytest.mark.parametrize("name", EVALUATED)
def test_runs_are_evaluated_as_when_they_were_saved(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", name, "--corpus", "text.txt", "--split", "all", "--tokens", "64", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["nats_per_token"] == pytest.approx(EVALUATED[name], **CLOSE)


def test_a_checkpoint_that_two_processes_wrote_is_loaded(folder: Path) -> None:
    (checkpoint,) = Path("shared/checkpoints").glob("step-*")
    run, published = memspan.load(checkpoint), memspan.load("shared")
    assert (checkpoint / "shards").is_dir()
    assert run.step == int(checkpoint.name[5:]) == published.step
    for name, tensor in published.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor)


@pytest.mark.parametrize("name", READ_ON)
def test_memories_are_read_on_from(name: str, folder: Path) -> None:
    """A memory that is saved today is the model's for good."""
    run, path = memspan.load(name), Path(f"{name}.memory")
    assert run.model.fingerprint() == FINGERPRINTS[name]
    memory = run.model.load_memory(path)
    assert memory.tokens_seen.tolist() == [69]
    ids = torch.from_numpy(run.tokenizer.encode(TEXT).astype("int64"))[None]
    with torch.no_grad():
        losses = run.model(ids[:, :-1], memory, targets=ids[:, 1:]).losses
    assert losses.mean().item() == pytest.approx(READ_ON[name], **CLOSE)
    memory.save(path, FINGERPRINTS[name])
    run.model.load_memory(path)


@pytest.mark.parametrize("name", RESUMED)
def test_runs_are_resumed(name: str, folder: Path) -> None:
    """One with a history of changed options, and one whose checkpoint two processes wrote."""
    step, nats = RESUMED[name]
    main(["train", "--resume", name, "--data.corpus", "text.txt", "--train.steps", str(step)])
    last = metrics.read(folder / name / "metrics.jsonl")[-1]
    assert last["validation_nats_per_token"] == pytest.approx(nats, **CLOSE)
    assert checkpoints.latest(folder / name).state["step"] == step


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
