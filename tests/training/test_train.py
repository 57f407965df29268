"""Training: exact resumption, schedules, faults."""

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
from rich.console import Console

import memspan
from memspan.data.options import DataConfig
from memspan.data.prepared import prepare
from memspan.errors import MemspanError
from memspan.files.tensors import load_tensors
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.registry import MODELS
from memspan.models.transformer_xl.config import TransformerXLConfig as XL
from memspan.runs import checkpoints
from memspan.runs.folder import lock_run
from memspan.runs.options import RunConfig
from memspan.runs.run import create
from memspan.training import metrics, start, updates, validation
from memspan.training.checkpointer import Checkpointer
from memspan.training.options import OptimConfig, TrainConfig
from memspan.training.state import TrainingState
from memspan.training.summary import prompt_from
from warm import Child

SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "dropout": 0.1}
MODEL = XL(**SIZES, memory_length=8)
COMPRESSIVE = CompressiveConfig(**SIZES, memory_length=8, compressed_length=3, compression_rate=3)
FAVOR = FastWeightsConfig(**SIZES, feature_map="favor", favor_redraw=True)
LOOP = TrainConfig(
    steps=24,
    batch_size=2,
    segment_length=8,
    evaluate_every=9,
    evaluate_tokens=64,
    save_every=4,
    sample_tokens=0,
    device="cpu",
)


@pytest.fixture(autouse=True)
def _text(own_folders: Path) -> None:
    words = random.Random(1).choices(["memory", "segment", "the", "of", "a\n"], k=400)
    Path("text.txt").write_text(" ".join(words))


def config(model: object = MODEL, **loop: object) -> RunConfig:  # type: ignore[type-arg]
    return RunConfig(
        model=model,
        architecture=next(n for n, kind in MODELS.items() if isinstance(model, kind)),
        data=DataConfig(corpus="text.txt", tokenizer="characters"),
        optim=OptimConfig(warmup_steps=5),
        train=dataclasses.replace(LOOP, **loop),  # type: ignore[arg-type]
    )


def quiet() -> Console:
    return Console(quiet=True)


def final(folder: str) -> dict[str, torch.Tensor]:
    newest = sorted((Path(folder) / "checkpoints").iterdir())[-1]
    return (
        load_tensors(newest / "model.safetensors")[0]
        | load_tensors(newest / "training.safetensors")[0]
    )


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("model", "loop"),
    [
        (MODEL, {}),
        (MODEL, {"accumulate": 3}),
        (COMPRESSIVE, {}),
        (COMPRESSIVE, {"accumulate": 2, "accumulate_later": 4, "accumulate_from": 13}),
        # Its features are drawn again in training.
        (FAVOR, {}),
    ],
)
def test_resume_continues_bit_for_bit(
    model: object, loop: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(model, **loop)
    start.train(options, Path("whole"))
    original, calls = updates.Updater.update, 0

    def update(self: updates.Updater) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 15:
            raise RuntimeError("power cut")
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        with pytest.raises(RuntimeError, match="power cut"):
            start.train(options, Path("cut"))
    start.resume(Path("cut"))
    assert_same(final("whole"), final("cut"))
    assert (Path("whole") / "model.safetensors").read_bytes() == (
        Path("cut") / "model.safetensors"
    ).read_bytes()

    def losses(folder: str) -> list[tuple[object, ...]]:
        records = metrics.read(Path(folder) / "metrics.jsonl")
        return [(r["step"], r.get("validation_nats_per_token")) for r in records]

    assert losses("whole") == losses("cut")


def test_a_run_goes_on_with_or_without_recomputing() -> None:
    """It changes no number, with dropout and a memory that gradients flow through."""
    loop = {"accumulate": 2, "gradient_segments": 2, "steps": 8}
    options = config(dataclasses.replace(MODEL, dropout=0.2), **loop)
    options = dataclasses.replace(options, optim=OptimConfig(schedule="constant"))
    first = dataclasses.replace(options, train=dataclasses.replace(options.train, steps=4))
    rest = dataclasses.replace(options.train, recompute=True)
    start.train(options, Path("plain"))
    start.train(first, Path("changed"))
    start.resume(Path("changed"), config=dataclasses.replace(options, train=rest))
    assert_same(final("plain"), final("changed"))
    assert "recompute = true" in Path("changed/config.toml").read_text()


@pytest.mark.processes
def test_sigkill_at_a_random_step_loses_nothing() -> None:
    options = config(steps=60, save_every=5, evaluate_every=30)
    killed = Child("killed", start.train, options, Path("run"))
    checkpoints_of = Path("run/checkpoints")
    while killed.poll() is None and not len(list(checkpoints_of.glob("step-*"))) >= 2:
        time.sleep(0.01)
    time.sleep(random.random() * 0.3)
    killed.send_signal(signal.SIGKILL)
    status, errors = killed.ended()
    assert status == -signal.SIGKILL, errors
    start.resume(Path("run"))
    start.train(options, Path("whole"))
    assert_same(final("whole"), final("run"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_saves_and_resumes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = config()
    start.train(options, Path("whole"))
    original = updates.Updater.update

    def update(self: updates.Updater) -> torch.Tensor:
        if self.state.step == 10:
            os.kill(os.getpid(), getattr(signal, name))
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(updates.Updater, "update", update)
        start.train(options, Path("cut"))
    assert checkpoints.latest(Path("cut")).state["step"] == 11
    start.resume(Path("cut"))
    assert_same(final("whole"), final("cut"))


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = updates.Updater.update

    def update(self: updates.Updater) -> torch.Tensor:
        if self.state.step == 13:
            next(self.state.model.parameters()).data.fill_(float("nan"))
        return original(self)

    monkeypatch.setattr(updates.Updater, "update", update)
    with pytest.raises(MemspanError, match="not finite at step 14"):
        start.train(config(), Path("r"))
    saved = checkpoints.latest(Path("r")).load()
    assert saved.state["step"] == 12
    assert all(t.isfinite().all() for t in saved.weights.values())


def test_a_full_disk_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    start.train(config(steps=8), Path("r"))
    before = final("r")
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
    assert_same(before, final("r"))
    memspan.load("r")


@pytest.mark.parametrize(
    ("keep", "left"),
    [(2, [4, 16, 20]), (1, [4, 20]), (3, [4, 12, 16, 20]), (0, [4, 8, 12, 16, 20])],
)
def test_the_newest_checkpoints_and_the_best_stay(
    keep: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    original = validation.Validation.score

    def score(self: validation.Validation, batch_size: int, emptied: bool = False) -> object:
        got = original(self, batch_size, emptied=emptied)
        if emptied:
            return got
        return dataclasses.replace(got, nats=next(scores) * got.tokens)

    monkeypatch.setattr(validation.Validation, "score", score)
    start.train(config(evaluate_every=4, steps=20, keep=keep), Path("r"))
    assert checkpoints.steps_of(Path("r")) == left
    assert Path("r/checkpoints/best").read_text() == "step-00000004\n"
    assert memspan.load("r").step == 4


def test_load_gives_model_and_tokenizer() -> None:
    tied = dataclasses.replace(config(), embedding=EmbeddingConfig(cutoffs=(4, 8), div_val=2))
    start.train(tied, Path("r"))
    run = memspan.load("r")
    assert run.tokenizer.decode(run.tokenizer.encode(b"the memory")) == b"the memory"
    ids = torch.from_numpy(run.tokenizer.encode(b"the memory").astype("int64"))[None]
    assert run.model(ids).logits.shape == (1, 10, run.tokenizer.vocab_size)
    assert not run.model.training
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


def test_a_run_is_saved_before_it_is_trained() -> None:
    state = updater_of(config()).state
    with lock_run(Path("run")) as lock:
        create(lock, state.config, state.prepared.tokenizer)
        Checkpointer(state, Path("run"), lock, Console(quiet=True)).save()
    assert memspan.load("run").step == 0


def test_effective_batches_grow() -> None:
    """The text is read on by what each update takes; the loss is a mean over all of it."""
    loop = {"accumulate": 2, "accumulate_later": 5, "accumulate_from": 3}
    options = config(steps=6, evaluate_every=0, **loop)
    assert [options.train.segments_read(n) for n in range(7)] == [0, 2, 4, 6, 11, 16, 21]
    start.train(options, Path("run"))
    last = metrics.read(Path("run/metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"]) == (6, 21 * 2 * 8)
    streams = checkpoints.latest(Path("run")).state["streams"]
    training = updater_of(config(steps=6)).state
    for _ in range(21):
        training.streams.next()
    assert streams == training.streams.state_dict()


def updater_of(options: RunConfig) -> updates.Updater:  # type: ignore[type-arg]
    prepared = prepare("text.txt", "characters", None)
    return updates.Updater(TrainingState(options, prepared, torch.device("cpu")))


def test_an_architecture_and_a_config_that_differ() -> None:
    with pytest.raises(MemspanError, match="goes with a TransformerXLConfig"):
        RunConfig(model=COMPRESSIVE)


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


def test_training_learns() -> None:
    start.train(config(steps=60, evaluate_every=60), Path("r"))
    losses = [
        r["train_nats_per_token"]
        for r in metrics.read(Path("r/metrics.jsonl"))
        if "train_nats_per_token" in r
    ]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (b"def f(x):\n    return x", "def f(x):"),
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
    assert checkpoints.latest(folder).state["step"] == 3
    assert capfd.readouterr() == ("", "")


def test_a_state_comes_back_from_its_snapshot() -> None:
    """Weights, moments, memory, place in the text, counts and scores; then updates are the same."""
    updater = updater_of(config(accumulate=2))
    state = updater.state
    for _ in range(3):
        updater.update()
    state.note_score(2.0)
    state.note_score(3.0)
    saved = state.snapshot(Path())
    saved = dataclasses.replace(
        saved,
        **{
            n: {k: t.clone() for k, t in getattr(saved, n).items()} for n in ("weights", "training")
        },
    )
    expected = [updater.update() for _ in range(2)]
    again = updater_of(config(accumulate=2, seed=5))
    again.state.restore(saved, Path("run"))
    assert (again.state.step, again.state.best, again.state.best_step) == (3, 2.0, 3)
    assert again.state.is_best
    assert [again.update() for _ in range(2)] == expected
    moments = dict(saved.training)
    name = next(n for n in moments if n.endswith("exp_avg"))
    moments[name] = moments[name].double()
    with pytest.raises(MemspanError, match=r"optimiser's state of .* has another form"):
        again.state.restore(dataclasses.replace(saved, training=moments), Path("run"))
    numbers = {**saved.training, "optimizer/0/params": torch.tensor(1.0)}
    with pytest.raises(MemspanError, match=r"the optimiser has no number params\): restore both"):
        again.state.restore(dataclasses.replace(saved, training=numbers), Path("run"))
