"""Several processes: the same losses as one, shared checkpoints that any number of processes resume."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import main as torchrun

import memspan
import tiny_runs
from memspan import cli
from memspan.data.options import DataConfig
from memspan.errors import MemspanError
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs import checkpoints
from memspan.runs.folder import lock_run
from memspan.runs.options import RunConfig, to_toml
from memspan.training import metrics, start, trainer
from memspan.training.options import OptimConfig
from several_processes import OWN, run, together, wait_with_a_child
from tiny_runs import assert_same
from warm import Child, listeners, wait_for, workers

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24}
ADAPTIVE = EmbeddingConfig(cutoffs=(3, 6), div_val=2, d_embed=8)
MODELS: dict[str, tuple[Any, EmbeddingConfig, dict[str, int]]] = {
    # Tied and adaptive embeddings, parameters without gradient, gradients through several segments.
    "transformer-xl": (TransformerXLConfig(**SMALL, memory_length=8), ADAPTIVE, {"accumulate": 3}),
    "compressive": (
        CompressiveConfig(**SMALL, memory_length=8, compressed_length=4, compression_rate=2),
        EmbeddingConfig(),
        {"accumulate": 3, "gradient_segments": 2},
    ),
    "feedback": (FeedbackConfig(**SMALL, memory_length=8), EmbeddingConfig(), {}),
    "fast-weights": (FastWeightsConfig(**SMALL), EmbeddingConfig(tie=False), {}),
    "gated-delta-net": (GatedDeltaNetConfig(**SMALL), EmbeddingConfig(), {}),
}
SPOILT = (("fast-weights", "ddp"), ("compressive", "fsdp"))
"""Where a row of one process's memory becomes NaN, and all leave that update out."""
KINDS = ("ddp", "fsdp")
several = pytest.mark.processes
STEPS, CUT = 5, 3
SOURCE = str(Path(memspan.__file__).parents[1])


def begin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "LOG_EVERY", 1)
    sentence = "what was read is kept, and what is kept is read again; "
    Path("text.txt").write_text("".join(sentence[: 9 + n % 40] for n in range(90)))


@pytest.fixture(autouse=True)
def _text(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch)


def config(name: str, kind: str = "ddp", model: Any = None, **loop: Any) -> RunConfig[Any]:
    usual, embedding, more = MODELS[name]
    settings = {"steps": STEPS, "batch_size": 4, "segment_length": 6, "parallel": kind}
    settings |= {"evaluate_every": STEPS, "evaluate_tokens": 34, "save_every": 0, **more, **loop}
    options = tiny_runs.options(
        model or usual, OptimConfig(warmup_steps=2, clip_norm=0.5), **settings
    )
    data = DataConfig(corpus="text.txt", tokenizer="characters")
    return dataclasses.replace(options, embedding=embedding, data=data)


def written(options: RunConfig[Any]) -> str:
    Path("r.toml").write_text(to_toml(options))
    return "r.toml"


def losses(folder: str) -> list[tuple[int, str, float]]:
    wanted = ("train_nats_per_token", "validation_nats_per_token")
    return [
        (record["step"], name, record[name])
        for record in metrics.read(Path(folder) / "metrics.jsonl")
        for name in wanted
        if name in record
    ]


def assert_same_losses(a: str, b: str, n_losses: int = STEPS) -> None:
    """In every step and at every validation; float32 has a resolution of 1e-7."""
    ours, theirs = losses(a), losses(b)
    assert [x[:2] for x in ours] == [x[:2] for x in theirs], b
    assert len({step for step, *_ in ours}) == n_losses
    assert [x[2] for x in ours] == pytest.approx([x[2] for x in theirs], rel=1e-6, abs=0), b


def weights(folder: str) -> dict[str, torch.Tensor]:
    return checkpoints.latest(Path(folder)).load().weights


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: ``NAME-1`` in one process, ``NAME-KIND`` in two; the others as tests say.

    The last process scores fewer tokens than the other.
    """
    folder = tmp_path_factory.mktemp("learned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        begin(patch)
        jobs = []
        for name in MODELS:
            run({"config": config(name), "folder": f"{name}-1", "unscored": 4})
            for kind in KINDS:
                options = config(name, kind)
                jobs.append({"config": options, "folder": f"{name}-{kind}", "unscored": 4})
        for name, kind in SPOILT:
            options = config(name, kind, non_finite="skip")
            jobs.append({"config": options, "folder": f"{name}-{kind}-spoilt", "spoil": 2})
            options = config(name, non_finite="skip")
            run({"config": options, "folder": f"{name}-spoilt", "spoil": 2})
        together(2, jobs)
    return folder


@several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_learn_as_one(name: str, kind: str, learned: Path) -> None:
    """Every scored token has the same weight, whichever process scores it."""
    assert_same_losses(f"{learned}/{name}-1", f"{learned}/{name}-{kind}")
    one = weights(f"{learned}/{name}-1")
    for key, tensor in weights(f"{learned}/{name}-{kind}").items():
        # AdamW divides by the gradient's size: where that is rounding, so is the quotient.
        torch.testing.assert_close(tensor, one[key], rtol=1e-3, atol=1e-4)


@several
def test_all_stop_early_together_and_count_on_when_resumed() -> None:
    """Each validation improves, but by less than the threshold."""
    stopping = {"early_stopping_patience": 2, "early_stopping_threshold": 10.0, "evaluate_every": 1}
    ddp, fsdp = (config("fast-weights", kind, **stopping) for kind in KINDS)
    jobs = [{"config": ddp, "folder": "ddp"}, {"config": fsdp, "folder": "fsdp"}]
    jobs += [{"config": fsdp, "folder": "cut", "stop": 2}, {"copy": "cut", "folder": "again"}]
    together(2, jobs)
    counts = {}
    for folder in (*KINDS, "cut", "again"):
        state = checkpoints.latest(Path(folder)).state
        counts[folder] = state["step"], state["unimproved"]
    assert counts == {"ddp": (3, 2), "fsdp": (3, 2), "cut": (2, 1), "again": (3, 2)}
    assert losses("fsdp") == losses("again")


@several
@pytest.mark.parametrize(("name", "kind"), SPOILT)
def test_all_skip_an_update_that_is_not_finite_in_one(name: str, kind: str, learned: Path) -> None:
    alone, spoilt = f"{learned}/{name}-spoilt", f"{learned}/{name}-{kind}-spoilt"
    assert_same_losses(alone, spoilt, STEPS - 1)
    health = checkpoints.latest(Path(spoilt)).state["health"]
    assert health == {"skipped_updates": 1, "reset_memory_rows": 1}
    assert checkpoints.latest(Path(alone)).state["health"] == health


@several
def test_any_number_goes_on_where_two_were_stopped() -> None:
    """Losses go on as those of one process; with dropout, those of two bit for bit."""
    dropout = dataclasses.replace(MODELS["transformer-xl"][0], dropout=0.2)
    chosen = {
        "sharded": config("transformer-xl", "fsdp", save_every=2, evaluate_every=4),
        "replicated": config("compressive", save_every=2),
        "random": config("transformer-xl", model=dropout),
    }
    others = [name for name in chosen if name != "random"]
    jobs: list[dict[str, Any]] = []
    for name, options in chosen.items():
        jobs.append({"config": options, "folder": f"{name}-cut", "stop": CUT})
        if name == "random":
            jobs.append({"config": options, "folder": "random-whole"})
            jobs.append({"copy": "random-cut", "folder": "random-2"})
        else:
            # One process has nothing to shard.
            alone = dataclasses.replace(options.train, parallel="ddp")
            options = dataclasses.replace(options, train=alone)
            run({"config": options, "folder": f"{name}-whole"})
    together(2, jobs)
    four = [{"copy": f"{name}-cut", "folder": f"{name}-4"} for name in others]
    together(4, four)
    for name in others:
        run({"copy": f"{name}-cut", "folder": f"{name}-1"})
        assert_same_losses(f"{name}-whole", f"{name}-1")
        assert_same_losses(f"{name}-whole", f"{name}-4")
    assert losses("random-whole") == losses("random-2")
    assert_same("random-whole", "random-2")

    # In one process what is left of several is a plain run, and so it is after an export.
    cut = Path("replicated-cut")
    assert exported_names(cut) == exported_names(Path("replicated-whole"))
    run({"copy": str(cut), "folder": "replicated-exported"})
    assert_same_losses("replicated-whole", "replicated-exported")

    # A damaged shard is named, and the checkpoint before it is there to go on from.
    newest = Path("sharded-cut/checkpoints/step-00000003/shards")
    shard = sorted(newest.iterdir())[0]
    content = bytearray(shard.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    shard.write_bytes(content)
    with pytest.raises(MemspanError, match=rf"{shard.name} is damaged.* go on from step 2"):
        start.resume(Path("sharded-cut"))
    shard.unlink()
    with pytest.raises(MemspanError, match=rf"{shard.name} is missing"):
        checkpoints.latest(Path("sharded-cut")).load()
    shutil.rmtree(newest.parent)
    run({"folder": "sharded-cut"})
    assert_same_losses("sharded-whole", "sharded-cut")


OPTIMISERS = [("sgd", "fsdp"), *(("odd", kind) for kind in KINDS)]
"""Others than the usual one; odd is a function's. PyTorch has Muon from 2.9 on."""
if hasattr(torch.optim, "Muon"):
    OPTIMISERS += [("muon", kind) for kind in KINDS]


@several
def test_optimisers_learn_and_go_on_in_two_processes() -> None:
    """As in one process, to the precision of muon's products; after a stop bit for bit, or in one."""

    def job(name: str, kind: str, folder: str) -> dict[str, Any]:
        options = config("fast-weights", kind)
        named = {} if name in OWN else {"optimiser": name}
        optim = dataclasses.replace(options.optim, learning_rate=0.1, **named)  # type: ignore[arg-type]
        options = dataclasses.replace(options, optim=optim)
        return {"config": options, "folder": folder, "optimiser": name}

    jobs = []
    for name, kind in OPTIMISERS:
        cut = f"{name}-{kind}-cut"
        jobs += [job(name, kind, f"{name}-{kind}"), {**job(name, kind, cut), "stop": CUT}]
        jobs.append({"copy": cut, "folder": f"{name}-{kind}-again", "optimiser": name})
    together(2, jobs)
    for name in dict(OPTIMISERS):
        run(job(name, "ddp", f"{name}-alone"))
    for name, kind in OPTIMISERS:
        whole, again, one = (f"{name}-{kind}{part}" for part in ("", "-again", "-1"))
        run({"copy": f"{name}-{kind}-cut", "folder": one, "optimiser": name})
        expected = [loss for *_, loss in losses(f"{name}-alone")]
        assert expected[-1] < expected[0] - 0.02
        for folder in (whole, one):
            found = [loss for *_, loss in losses(folder)]
            assert found == pytest.approx(expected, rel=5e-3 if name == "muon" else 1e-6, abs=0)
        assert losses(again) == losses(whole)
        assert_same(whole, again)


def exported_names(folder: Path) -> set[str]:
    cli.main(["export", str(folder)])
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    memspan.load(folder)
    return {p.name for p in (*folder.iterdir(), *newest.iterdir())}


@several
def test_the_command_starts_processes_and_ends_with_one_line() -> None:
    """A killed process and Ctrl-C, neither of which harms the run; nobody else can reach it."""
    options = config("transformer-xl", steps=5000, evaluate_every=0, save_every=5)
    path = written(options)
    # What a downloaded folder may hold: none of the processes may import it.
    plant("random.py", "tyro.py")
    begun = launched("begun", "--preset", path, "--out", "r")
    pids = wait_for(lambda: checkpoints.steps_of(Path("r")) and workers(begun.pid), begun)
    listening = {address for pid in (begun.pid, *pids) for address in listeners(pid)}
    assert listening
    assert not [address for address in listening if not address.is_loopback]
    os.kill(pids[1], signal.SIGKILL)
    status, said = begun.ended(60)
    assert status == 1
    assert said == (
        "memspan: process 1 of the run ended with SIGKILL, and the others were stopped: go on from "
        "the last checkpoint with --resume\n"
    )

    before = checkpoints.latest(Path("r")).state["step"]
    again = launched("again", "--resume", "r")
    wait_for(lambda: checkpoints.latest(Path("r")).state["step"] > before, again)
    with (
        pytest.raises(MemspanError, match="another process is training"),
        lock_run(Path("r")),
    ):
        pass
    again.send_signal(signal.SIGINT)
    assert again.ended(60) == (0, "")
    newest = checkpoints.latest(Path("r")).state["step"]
    # Its weights can be used without an export.
    assert memspan.load("r").step == newest


@several
def test_processes_end_with_their_launcher() -> None:
    """Or they would write on, beside the run that goes on from there."""
    launcher = Child("launcher", wait_with_a_child)
    pid = wait_for(lambda: Path("pid").exists() and Path("pid").read_text(), launcher)
    launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists(), None)


def launched(name: str, *arguments: str) -> Child:
    """``memspan train`` with two processes, by its own launcher."""
    return Child(name, cli.main, ["train", *arguments, "--nproc", "2"], PYTHONPATH=SOURCE)


def plant(*modules: str) -> None:
    """Put modules into the current folder that end the process which imports them."""
    # Only once the process that the others are forks of has imported everything.
    Child("first", int).ended()
    for name in modules:
        Path(name).write_text("raise SystemExit('code of the current folder runs')")


@several
def test_processes_of_another_launcher_train_together() -> None:
    """They meet by the environment, as torchrun's do; apart, the second would find the folder taken."""
    path = written(config("fast-weights", steps=2, evaluate_every=2))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    arguments = ["train", "--preset", path, "--out", "r"]
    ranks = [
        Child(f"rank-{rank}", cli.main, arguments, RANK=rank, LOCAL_RANK=rank, **common)
        for rank in "01"
    ]
    ended = [rank.ended() for rank in ranks]
    assert [status for status, _ in ended] == [0, 0], ended
    assert memspan.load("r").step == 2


@several
def test_a_mistake_of_all_processes_is_said_once() -> None:
    path = written(config("transformer-xl", batch_size=3))
    # Not of the standard library: python -m has imported parts of that before any code of ours.
    plant("tyro.py")
    # A port that the system finds: tests run side by side.
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = ["-m", "memspan", "train", "--preset", path, "--out", "r"]
    arguments = [*meeting, "--nproc-per-node", "2", *command]
    status, said = Child("torchrun", torchrun, arguments, PYTHONPATH=SOURCE).ended()
    assert status == 1
    # Beside it stands what torchrun says itself.
    assert len(re.findall("^memspan: 3 batch rows", said, re.MULTILINE)) == 1
    assert not Path("r").exists()
