"""Training: exact resumption, updates, what stays and what is shown."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import memspan
import tiny_runs
from memspan.errors import MemspanError
from memspan.lab.data.options import DataConfig
from memspan.lab.runs import checkpoints
from memspan.lab.runs.options import RunConfig
from memspan.lab.training import metrics, start, updates
from memspan.lab.training.options import OptimConfig
from memspan.lab.training.summary import prompt_from
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig as XL
from tiny_runs import assert_same, at_step, cut_at, step_of
from warm import Child

pytestmark = pytest.mark.usefixtures("tiny_text")
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "dropout": 0.1}
MODEL = XL(**SIZES, memory_length=8)
COMPRESSIVE = CompressiveConfig(**SIZES, memory_length=8, compressed_length=3, compression_rate=3)
# Only by way of memory does the task reach the compression.
BY_MEMORY = dataclasses.replace(COMPRESSIVE, auxiliary_loss="none", task_gradient=True)
FAVOR = FastWeightsConfig(**SIZES, feature_map="favor")
WARMED = OptimConfig(warmup_steps=5)
CONSTANT = OptimConfig(schedule="constant")
LOOP = {"steps": 12, "segment_length": 8, "save_every": 4}


def config(model: Any = MODEL, optim: OptimConfig = WARMED, **loop: Any) -> RunConfig[Any]:
    usual = tiny_runs.options(model, optim, **LOOP | loop)
    return dataclasses.replace(usual, data=DataConfig("text.txt", "characters"))


@pytest.mark.parametrize(
    ("model", "loop"),
    [
        (MODEL, {"accumulate": 3, "gradient_segments": 2, "recompute": True}),
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
    steps = step_of("whole")
    with cut_at(steps - 2):
        start.train(options, Path("cut"))
    start.resume(Path("cut"))
    assert_same("whole", "cut")
    published = [Path(folder, "model.safetensors").read_bytes() for folder in ("whole", "cut")]
    assert published[0] == published[1]
    # Two rows, as far as the options say.
    last = metrics.read(Path("whole/metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"]) == (steps, 2 * options.train.tokens_read(steps))


def test_recomputing_changes_no_number() -> None:
    """With dropout and a memory that gradients flow through."""
    losses = []
    for recompute in (False, True):
        options = config(optim=CONSTANT, accumulate=2, gradient_segments=2, recompute=recompute)
        updater = updates.Updater(tiny_runs.state_of(options))
        losses.append([updater.update() for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.processes
def test_sigkill_at_a_random_step_loses_nothing() -> None:
    options = config(optim=CONSTANT, steps=100_000, save_every=5, evaluate_every=30)
    killed = Child("killed", start.train, options, Path("run"))
    while killed.poll() is None and len(checkpoints.steps_of(Path("run"))) < 2:
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_an_interrupt_saves(name: str) -> None:
    number = getattr(signal, name)
    numbers = list[int]()
    before = signal.getsignal(number)
    with at_step(5, lambda _: os.kill(os.getpid(), number)):
        start.train(config(steps=7, evaluate_every=0), Path("cut"), on_stop=numbers.append)
    assert step_of("cut") == 6
    assert numbers == [number]
    assert signal.getsignal(number) == before


def test_a_signal_with_another_use_does_not_stop_training() -> None:
    got = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        with at_step(2, lambda _: os.kill(os.getpid(), signal.SIGUSR1)):
            start.train(config(steps=4, evaluate_every=0), Path("r"), on_stop=got.append)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (step_of("r"), got) == (4, [signal.SIGUSR1])


def test_a_full_disk_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with (
        at_step(5, lambda _: monkeypatch.setattr(os, "fsync", full)),
        pytest.raises(MemspanError, match="No space left on device"),
    ):
        start.train(config(evaluate_every=0), Path("r"))
    assert not list(Path("r/checkpoints").glob(".*"))
    assert memspan.load("r").step == step_of("r") == 4


def test_load_gives_model_and_tokenizer() -> None:
    tied = EmbeddingConfig(cutoffs=(4, 8), div_val=2)
    run = memspan.load(start.train(dataclasses.replace(config(steps=1), embedding=tied), "r"))
    ids = torch.from_numpy(run.tokenizer.encode(b"the memory").astype("int64"))[None]
    assert run.tokenizer.decode(ids[0].tolist()) == b"the memory"
    assert run.model(ids).logits.shape == (1, 10, run.tokenizer.vocab_size)
    assert not run.model.training
    # Tied weights are one tensor still.
    assert run.model.head.tables[0] is run.model.embedding.tables[0]


@pytest.mark.parametrize(
    ("model", "n_joined", "clip_norm"),
    [
        (MODEL, 1, 0.0),
        (COMPRESSIVE, 1, 0.0),
        (COMPRESSIVE, 1, 0.1),
        (BY_MEMORY, 1, 0.0),
        (BY_MEMORY, 2, 1e-3),
    ],
    ids=["transformer-xl", "auxiliary", "clipped", "alone", "joined-and-clipped"],
)
def test_an_update_is_the_mean_over_all_that_it_scores(
    model: Any, n_joined: int, clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the tokens of all accumulated segments, however many each of them scores. Its gradient goes
    back through so many joined segments; that of compressions is clipped by a norm of its own."""
    model = dataclasses.replace(model, dropout=0.0)
    optim = OptimConfig(clip_norm=clip_norm)
    options = config(model, optim, accumulate=3, gradient_segments=n_joined)
    state = tiny_runs.state_of(options)
    updater = updates.Updater(state)
    for _ in range(2):
        updater.update()
    segments = []
    for n in range(3):
        segment = state.streams.next()
        targets = segment.targets.clone()
        targets[:, : 3 * n] = -100
        segments.append(dataclasses.replace(segment, targets=targets))
    losses = []
    auxiliary = []
    memory = state.memory
    for n, segment in enumerate(segments, 1):
        output = state.model(segment.inputs, memory, targets=segment.targets)
        memory = output.memory if n % n_joined else output.memory.detach()
        losses.append(output.losses[segment.targets != -100])
        auxiliary.append(output.auxiliary_loss)
    mean = torch.cat(losses).mean()
    parameters = dict(state.model.named_parameters())
    total = mean + torch.stack(auxiliary).mean()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    wanted = dict(zip(parameters, gradients, strict=True))
    for compresses in (False, True):
        group = [g for n, g in wanted.items() if ("compression" in n) == compresses]
        norm = torch.nn.utils.get_total_norm([g for g in group if g is not None])
        for gradient in group:
            if gradient is not None and 0 < clip_norm < norm:
                gradient.mul_(clip_norm / norm)

    found = {}
    spy = lambda: found.update({n: p.grad for n, p in parameters.items()})  # noqa: E731
    monkeypatch.setattr(state.optimiser.optimizer, "step", spy)
    monkeypatch.setattr(state.streams, "next", iter(segments).__next__)
    torch.testing.assert_close(updater.update(), mean.detach())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    assert not any(t.requires_grad for t in state.memory.tensors().values())


@pytest.mark.plots
def test_statistics_are_logged_and_drawn() -> None:
    """Per layer, in training and at validation; the shares of attention as a picture."""
    start.train(config(COMPRESSIVE, evaluate_tokens=64), Path("run"))
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
