"""Training: exact resumption, updates, what stays and what is shown."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import memspan
import tiny_runs
from memspan.data.options import DataConfig
from memspan.errors import MemspanError
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig as XL
from memspan.runs import checkpoints
from memspan.runs.folder import lock_run
from memspan.runs.options import RunConfig
from memspan.runs.run import create
from memspan.training import metrics, start, updates, validation
from memspan.training.options import OptimConfig
from memspan.training.summary import prompt_from
from memspan.training.trainer import Checkpointer
from tiny_runs import assert_same, at_step, cut_at, step_of
from warm import Child

pytestmark = pytest.mark.usefixtures("tiny_text")
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "dropout": 0.1}
MODEL = XL(**SIZES, memory_length=8)
COMPRESSIVE = CompressiveConfig(**SIZES, memory_length=8, compressed_length=3, compression_rate=3)
FAVOR = FastWeightsConfig(**SIZES, feature_map="favor", favor_redraw=True)
WARMED, CONSTANT = OptimConfig(warmup_steps=5), OptimConfig(schedule="constant")
LOOP = {
    "steps": 12,
    "segment_length": 8,
    "evaluate_every": 5,
    "evaluate_tokens": 64,
    "save_every": 4,
}


def config(model: Any = MODEL, optim: OptimConfig = WARMED, **loop: Any) -> RunConfig[Any]:
    usual = tiny_runs.options(model, optim, **LOOP | loop)
    return dataclasses.replace(usual, data=DataConfig("text.txt", "characters"))


def updater_of(options: RunConfig[Any]) -> updates.Updater:
    return updates.Updater(tiny_runs.state_of(options))


@pytest.mark.parametrize(
    ("model", "loop"),
    [
        (MODEL, {"accumulate": 3}),
        (COMPRESSIVE, {"accumulate": 2, "accumulate_later": 4, "accumulate_from": 7}),
        # Its features are drawn again in training.
        (FAVOR, {}),
        (MODEL, {"first_segment_length": 2, "curriculum_steps": 9}),
        (MODEL, {"steps": None, "max_tokens": 12 * 16 + 7}),
        (MODEL, {"evaluate_every": 1, "early_stopping_patience": 3, "early_stopping_threshold": 9}),
    ],
    ids=["accumulate", "compressive", "favor", "curriculum", "max-tokens", "early-stopping"],
)
def test_a_run_that_is_cut_goes_on_bit_for_bit(model: object, loop: dict[str, Any]) -> None:
    options = config(model, **loop)
    start.train(options, Path("whole"))
    with cut_at(step_of("whole") - 2):
        start.train(options, Path("cut"))
    start.resume(Path("cut"))
    assert_same("whole", "cut")
    published = [Path(folder, "model.safetensors").read_bytes() for folder in ("whole", "cut")]
    assert published[0] == published[1]


def test_a_run_goes_on_with_or_without_recomputing() -> None:
    """It changes no number, with dropout and a memory that gradients flow through."""
    loop: Any = {"optim": CONSTANT, "accumulate": 2, "gradient_segments": 2}
    start.train(config(**loop, steps=8), Path("plain"))
    start.train(config(**loop, steps=4), Path("changed"))
    start.resume(Path("changed"), config=config(**loop, steps=8, recompute=True))
    plain, changed = (checkpoints.latest(Path(name)).load() for name in ("plain", "changed"))
    assert all(torch.equal(x, changed.weights[name]) for name, x in plain.weights.items())
    assert "recompute = true" in Path("changed/config.toml").read_text()


@pytest.mark.processes
def test_sigkill_at_a_random_step_loses_nothing() -> None:
    options = config(optim=CONSTANT, steps=100_000, save_every=5, evaluate_every=30)
    killed = Child("killed", start.train, options, Path("run"))
    checkpoints_of = Path("run/checkpoints")
    while killed.poll() is None and not len(list(checkpoints_of.glob("step-*"))) >= 2:
        time.sleep(0.01)
    time.sleep(random.random() * 0.3)
    killed.send_signal(signal.SIGKILL)
    status, errors = killed.ended()
    assert status == -signal.SIGKILL, errors
    steps = step_of("run") + 12
    options = config(optim=CONSTANT, steps=steps, save_every=5, evaluate_every=30)
    start.resume(Path("run"), config=options)
    start.train(options, Path("whole"))
    assert_same("whole", "run")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_saves(name: str) -> None:
    with at_step(5, lambda _: os.kill(os.getpid(), getattr(signal, name))):
        start.train(config(steps=7, evaluate_every=0), Path("cut"))
    assert step_of("cut") == 6


def test_a_full_disk_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    start.train(config(steps=4), Path("r"))
    saved = checkpoints.latest(Path("r")).load()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    newer = dataclasses.replace(saved, state=saved.state | {"step": 9})
    with monkeypatch.context() as patch, lock_run(Path("r")) as lock:
        lock.load()
        patch.setattr(os, "fsync", full)
        with pytest.raises(MemspanError, match="No space left on device"):
            checkpoints.save(lock, newer, True, 2)
    assert [p.name for p in (Path("r") / "checkpoints").iterdir() if p.name[0] == "."] == []
    assert memspan.load("r").step == step_of("r") == 4


@pytest.mark.parametrize(("keep", "left"), [(2, [4, 16, 20]), (0, [4, 8, 12, 16, 20])])
def test_the_newest_checkpoints_and_the_best_stay(
    keep: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(self: validation.Validation, batch_size: int, **options: bool) -> Any:
        scores = original(self, batch_size, **options)
        return dataclasses.replace(scores, nats=self.state.step * scores.tokens)

    original = validation.Validation.score
    monkeypatch.setattr(validation.Validation, "score", score)
    start.train(config(evaluate_every=4, steps=20, keep=keep), Path("r"))
    assert checkpoints.steps_of(Path("r")) == left
    assert Path("r/checkpoints/best").read_text() == "step-00000004\n"
    assert memspan.load("r").step == 4


def test_load_gives_model_and_tokenizer() -> None:
    """Of a run that is saved before it is trained."""
    tied = dataclasses.replace(config(), embedding=EmbeddingConfig(cutoffs=(4, 8), div_val=2))
    state = updater_of(tied).state
    with lock_run(Path("r")) as lock:
        create(lock, state.config, state.prepared.tokenizer)
        Checkpointer(state, Path("r"), lock).save()
    run = memspan.load("r")
    ids = torch.from_numpy(run.tokenizer.encode(b"the memory").astype("int64"))[None]
    assert run.tokenizer.decode(ids[0].tolist()) == b"the memory"
    assert run.model(ids).logits.shape == (1, 10, run.tokenizer.vocab_size)
    assert (run.step, run.model.training) == (0, False)
    # Tied weights are one tensor still.
    assert run.model.head.tables[0] is run.model.embedding.tables[0]


@pytest.mark.parametrize("model", [MODEL, COMPRESSIVE], ids=["transformer-xl", "compressive"])
def test_an_update_is_the_mean_over_all_that_it_scores(
    model: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the tokens of all accumulated segments, however many each of them scores."""
    model = dataclasses.replace(model, dropout=0.0)  # type: ignore[type-var]
    updater = updater_of(config(model, accumulate=3))
    updater.state.config = dataclasses.replace(updater.state.config, optim=OptimConfig(clip_norm=0))
    for _ in range(2):
        updater.update()
    segments = []
    for n in range(3):
        segment = updater.state.streams.next()
        targets = segment.targets.clone()
        targets[:, : 3 * n] = -100
        segments.append(dataclasses.replace(segment, targets=targets))
    losses, auxiliary, memory = [], [], updater.state.memory
    for segment in segments:
        output = updater.state.model(segment.inputs, memory, targets=segment.targets)
        memory = output.memory.detach()
        losses.append(output.losses[segment.targets != -100])
        auxiliary.append(output.auxiliary_loss)
    mean = torch.cat(losses).mean()
    parameters = dict(updater.state.model.named_parameters())
    total = mean + torch.stack(auxiliary).mean()
    wanted = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)

    found = {}
    spy = lambda: found.update({n: p.grad for n, p in parameters.items()})  # noqa: E731
    monkeypatch.setattr(updater.state.optimiser.optimizer, "step", spy)
    monkeypatch.setattr(updater.state.streams, "next", iter(segments).__next__)
    loss = updater.update()
    torch.testing.assert_close(loss, mean.detach())
    for name, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_effective_batches_grow() -> None:
    """The text is read on by what each update takes; the loss is a mean over all of it."""
    loop = {"accumulate": 2, "accumulate_later": 5, "accumulate_from": 3}
    options = config(steps=6, evaluate_every=0, **loop)
    assert [options.train.segments_read(n) for n in range(7)] == [0, 2, 4, 6, 11, 16, 21]
    start.train(options, Path("run"))
    last = metrics.read(Path("run/metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"]) == (6, 21 * 2 * 8)
    training = updater_of(config(steps=6)).state
    for _ in range(21):
        training.streams.next()
    assert checkpoints.latest(Path("run")).state["streams"] == training.streams.state_dict()


@pytest.mark.parametrize("segments", [1, 2])
def test_gradients_through_several_segments(segments: int) -> None:
    """Only by way of memory does the task reach the compression."""
    model = dataclasses.replace(COMPRESSIVE, auxiliary_loss="none", task_gradient=True)
    updater = updater_of(config(model, accumulate=4, gradient_segments=segments))
    compression = updater.state.model.backbone.auxiliary_parameters()
    before = [p.detach().clone() for p in compression]
    for _ in range(3):
        updater.update()
    moved = [
        not torch.equal(p, old) for p, old in zip(compression, before, strict=True) if p.dim() == 1
    ]
    # Matrices move by weight decay alone.
    assert all(moved) if segments == 2 else not any(moved)
    assert not any(t.requires_grad for t in updater.state.memory.tensors().values())


def test_gradients_are_clipped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the task's gradients are, the compression's are clipped by their own norm."""
    updater = updater_of(config(COMPRESSIVE))
    norms = []
    step = updater.state.optimiser.optimizer.step

    def spy() -> None:
        for group in updater.state.model.clip_groups():
            gradients = [p.grad.norm() for p in group if p.grad is not None]
            norms.append(torch.stack(gradients).norm().item() if gradients else 0.0)
        step()

    monkeypatch.setattr(updater.state.optimiser.optimizer, "step", spy)
    for parameter in updater.state.model.backbone.auxiliary_parameters():
        parameter.register_hook(lambda g: g * 1e6)
    for _ in range(3):
        updater.update()
    task, auxiliary = norms[-2:]
    assert auxiliary == pytest.approx(1.0, rel=1e-3)
    assert task > 0.3


@pytest.mark.plots
def test_statistics_are_logged_and_drawn() -> None:
    """Per layer, in training and at validation; the shares of attention as a picture."""
    start.train(config(COMPRESSIVE), Path("run"))
    records = metrics.read(Path("run/metrics.jsonl"))
    validations = [r for r in records if "validation_bits_per_byte" in r]
    for record in validations:
        for layer in (1, 2):
            parts = ("compressed", "memory", "segment")
            shares = [record[f"attention_{part}/layer_{layer}"] for part in parts]
            assert sum(shares) == pytest.approx(1.0)
            assert min(shares) > 0
            assert record[f"auxiliary_loss/layer_{layer}"] > 0
    assert any("train_auxiliary_loss/layer_2" in r for r in records)
    assert (Path("run") / "attention.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Größe ist relativ, sagte er.".encode(), "Größe ist relativ, sagte"),
        (b"\n- one\n#!/\nIt's", "It's"),
        (b"\x00\xff\xfe", ""),
        (b"A" * 100, ""),
    ],
)
def test_the_proposed_prompt_is_from_the_text(text: bytes, prompt: str) -> None:
    assert prompt_from(text) == prompt


def test_training_from_python_is_quiet_and_returns_the_folder(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With folders as text; a run goes on with other options."""
    options = config(steps=2)
    folder = start.train(options, "runs/r")
    assert folder == Path("runs/r")
    assert memspan.load(folder).step == 2
    assert start.resume("runs/r", config=config(steps=3)) == folder
    warm = start.train(options, "runs/warm", init_from=folder)
    assert memspan.load(warm).step == 2
    assert step_of(folder) == 3
    assert capfd.readouterr() == ("", "")
