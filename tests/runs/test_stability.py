"""Saved files load for good: see ``tests/saved/README.md``.

The numbers were recorded by the version that wrote the files. If one of these tests fails after the
release of that version, the code is wrong, not the recording.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from importlib.metadata import version
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import memspan
from memspan.errors import MemspanError
from memspan.files.tensors import load_tensors, save_tensors
from memspan.lab.cli import main
from memspan.lab.runs import checkpoints, history
from memspan.lab.training import metrics

SAVED = Path(__file__).parents[1] / "saved"
TEXT = b"Memory is what remains of what was read."
EVALUATED = {"run": 3.745078418403864, "shared": 4.221842218190432}
"""Nats per token of each run, over the first 64 tokens of ``text.txt``."""
READ_ON = 3.7257227897644043
"""Nats per token of :data:`TEXT`, read on from the saved memory."""
FINGERPRINT = "c3e048fb56e586b4b44e44337fae225396a7630611be2bd5dbbd95686d961b1d"
"""Fingerprint of the run's model. Its ``config.toml`` also names options at their defaults: a default
that changes would change the fingerprint."""
RESUMED = {"run": (54, 3.884472188949585), "shared": (18, 4.352114052772522)}
"""Last step and its validation score, nats per token, after training a few steps more."""
CLOSE = {"abs": 1e-4}


@pytest.fixture
def folder(own_folders: Path) -> Path:
    """A copy of the saved files, which tests may write to."""
    return shutil.copytree(SAVED, own_folders, dirs_exist_ok=True)


@pytest.mark.parametrize("name", EVALUATED)
def test_run_scores_as_when_saved(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", name, "--corpus", "text.txt", "--split", "all", "--tokens", "64", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["nats_per_token"] == pytest.approx(EVALUATED[name], **CLOSE)


def test_sharded_checkpoint_has_the_published_weights(folder: Path) -> None:
    (checkpoint,) = Path("shared/checkpoints").glob("step-*")
    run = memspan.load(checkpoint)
    published = memspan.load("shared")
    assert (checkpoint / "shards").is_dir()
    assert run.step == int(checkpoint.name[5:]) == published.step
    for name, tensor in published.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor)


def test_memory_is_read_on_from(folder: Path) -> None:
    run = memspan.load("run")
    assert run.model.fingerprint() == FINGERPRINT
    memory = run.model.load_memory("run.memory")
    assert memory.tokens_seen.tolist() == [42]
    ids = torch.from_numpy(run.tokenizer.encode(TEXT).astype("int64"))[None]
    with torch.no_grad():
        losses = run.model(ids[:, :-1], memory, targets=ids[:, 1:]).losses
    assert losses.mean().item() == pytest.approx(READ_ON, **CLOSE)


@pytest.mark.parametrize("name", RESUMED)
def test_run_is_resumed(name: str, folder: Path) -> None:
    """One has changed options in its history, the other a checkpoint that two processes wrote."""
    step, nats = RESUMED[name]
    main(["train", "--resume", name, "--data.corpus", "text.txt", "--train.steps", str(step)])
    last = metrics.read(folder / name / "metrics.jsonl")[-1]
    assert last["validation_nats_per_token"] == pytest.approx(nats, **CLOSE)
    assert checkpoints.latest(folder / name).state["step"] == step
    assert len(history.read(folder / name)) == (2 if name == "run" else 1)


def test_any_tensors_are_saved(tmp_path: Path) -> None:
    """Views, tensors that share their values, expanded and empty ones, under any names."""
    path = tmp_path / "t"
    numbers = torch.arange(6.0).view(2, 3)
    tensors = {"": torch.zeros(()), "none": torch.empty(0, 2), "b/ä\\": numbers, "twin": numbers}
    tensors |= {"turned": numbers.T, "row": numbers[1:], "expanded": torch.ones(1).expand(1, 1)}
    tensors |= {"conjugate": torch.tensor([1j]).conj(), "mask": numbers > 2}
    sealed = save_tensors(path, tensors, {"step": '"ü\n'})
    loaded, header = load_tensors(path)
    assert header == {"step": '"ü\n', "sha256": sealed}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype


@pytest.mark.skipif(
    [int(part) for part in version("safetensors").split(".")[:2]] < [0, 8],
    reason="older releases of safetensors copy",
)
def test_saving_makes_no_copy_in_memory(tmp_path: Path) -> None:
    """There is no room for one where a model fills the memory."""
    tensors = {"a": torch.zeros(1 << 20)}
    save_tensors(tmp_path / "t", tensors, {})
    tracemalloc.start()
    try:
        save_tensors(tmp_path / "t", tensors, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < tensors["a"].nbytes / 4


def test_whoever_may_read_other_files_may_read_tensors(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    save_tensors(tmp_path / "t", {"a": torch.zeros(2)}, {})
    assert (tmp_path / "t").stat().st_mode == (tmp_path / "text").stat().st_mode


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_errors_of_the_system_in_saving_are_told(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: any (os error {code})")

    monkeypatch.setattr(safetensors.torch, "save_file", refuse)
    with pytest.raises(MemspanError, match=os.strerror(code)):
        save_tensors(tmp_path / "t", {"a": torch.zeros(2)}, {})
    assert not list(tmp_path.iterdir())


def test_type_that_files_do_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("older")
    with pytest.raises(MemspanError, match=r"a is of type torch\.complex128"):
        save_tensors(tmp_path / "t", {"a": torch.zeros(2, dtype=torch.complex128)}, {})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]
