"""Several processes: the same losses as one, shared checkpoints that any number of processes resume."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import main as torchrun

import memspan
import tiny_runs
from command_line import harm
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.lab.data.options import DataConfig
from memspan.lab.distributed.reports import BY_US
from memspan.lab.runs import checkpoints
from memspan.lab.runs.folder import lock_run
from memspan.lab.runs.options import RunConfig, to_toml
from memspan.lab.training import metrics, start, trainer
from memspan.lab.training.options import OptimConfig
from memspan.models.compressive.config import CompressiveConfig
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.gated_delta_net.config import GatedDeltaNetConfig
from memspan.models.options import EmbeddingConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from several_processes import OWN, run, together, wait_with_a_child
from tiny_runs import assert_same
from warm import Child, listeners, wait_for, workers

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24}
XL = TransformerXLConfig(**SMALL, memory_length=8)
FAST = FastWeightsConfig(**SMALL)
COMPRESSIVE = CompressiveConfig(**SMALL, memory_length=8, compressed_length=4, compression_rate=2)
IMPROVES_TOO_LITTLE = {"early_stopping_patience": 2, "early_stopping_threshold": 10.0}
EMBEDDINGS = {
    XL: EmbeddingConfig(cutoffs=(3, 6), div_val=2, d_embed=8),
    FAST: EmbeddingConfig(tie=False),
}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # Tied and adaptive embeddings, parameters without gradient, gradients through several segments.
    "transformer-xl": (XL, {"accumulate": 3, "save_every": 1}, {}),
    "compressive": (COMPRESSIVE, {"accumulate": 3, "gradient_segments": 2}, {}),
    "feedback": (FeedbackConfig(**SMALL, memory_length=8), {}, {}),
    "fast-weights": (FAST, {}, {}),
    "gated-delta-net": (GatedDeltaNetConfig(**SMALL), {}, {}),
    # A row of the last process's memory becomes NaN, and all leave that update out.
    "spoilt-fast-weights": (FAST, {"non_finite": "skip"}, {"spoil": 2}),
    "spoilt-compressive": (COMPRESSIVE, {"non_finite": "skip"}, {"spoil": 2}),
    # All stop together, and count on when they are resumed.
    "early-stopping": (FAST, {"evaluate_every": 1, **IMPROVES_TOO_LITTLE}, {}),
    # Other optimisers than the usual one; odd is a function's.
    "sgd": (FAST, {}, {"optimiser": "sgd"}),
    "odd": (FAST, {}, {"optimiser": "odd"}),
    # Each process draws numbers of its own.
    "dropout": (dataclasses.replace(XL, dropout=0.2), {}, {}),
    "muon": (FAST, {}, {"optimiser": "muon"}),
}
"""Models, options of the loop and of jobs as :func:`several_processes.run` takes them."""
KINDS = {"spoilt-fast-weights": ["ddp"], "spoilt-compressive": ["fsdp"], "sgd": ["fsdp"]}
KINDS["dropout"] = []
AS_ONE = [(case, kind) for case in CASES for kind in KINDS.get(case, ["ddp", "fsdp"])]
# Stopped in two processes, and resumed in so many.
RESUMED: dict[tuple[str, str], tuple[int, ...]] = {
    ("transformer-xl", "fsdp"): (1, 2, 4),
    ("compressive", "ddp"): (1, 2, 4),
    ("early-stopping", "fsdp"): (1, 2),
    ("dropout", "ddp"): (2,),
}
RESUMED |= {(case, kind): (1, 2) for case, kind in AS_ONE if "optimiser" in CASES[case][2]}
several = pytest.mark.processes
STEPS = 5
CUT = 2
SOURCE = str(Path(memspan.__file__).parents[1])


def begin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "LOG_EVERY", 1)
    sentence = "what was read is kept, and what is kept is read again; "
    Path("text.txt").write_text("".join(sentence[: 9 + n % 40] for n in range(90)))


@pytest.fixture(autouse=True)
def _text(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch)


def config(case: str, kind: str = "ddp", **more: Any) -> RunConfig[Any]:
    model, loop, job = CASES[case]
    settings = {"steps": STEPS, "batch_size": 4, "segment_length": 6, "parallel": kind}
    settings |= {"evaluate_every": STEPS, "evaluate_tokens": 34, "save_every": 0, **loop, **more}
    optim = OptimConfig(warmup_steps=2, clip_norm=0.5)
    if name := job.get("optimiser"):
        own = {} if name in OWN else {"optimiser": name}
        optim = dataclasses.replace(optim, learning_rate=0.1, **own)
    data = DataConfig(corpus="text.txt", tokenizer="characters")
    embedding = EMBEDDINGS.get(model, EmbeddingConfig())
    options = tiny_runs.options(model, optim, **settings)
    return dataclasses.replace(options, embedding=embedding, data=data)


def job(case: str, folder: str, kind: str | None = None, **how: Any) -> dict[str, Any]:
    """To train in ``folder``, or without a ``kind`` to resume."""
    begun = {} if kind is None else {"config": config(case, kind)}
    return {"folder": folder, **begun, **CASES[case][2], **how}


def written(options: RunConfig[Any]) -> str:
    Path("r.toml").write_text(to_toml(options))
    return "r.toml"


def losses(folder: str | Path) -> list[tuple[int, str, float]]:
    wanted = ("train_nats_per_token", "validation_nats_per_token")
    return [
        (record["step"], name, record[name])
        for record in metrics.read(Path(folder) / "metrics.jsonl")
        for name in wanted
        if name in record
    ]


def assert_learns_as(one: str | Path, folder: str | Path) -> None:
    """The same losses in every step and at every validation, and the same counts."""
    ours = losses(one)
    theirs = losses(folder)
    assert [x[:2] for x in ours] == [x[:2] for x in theirs], folder
    # float32 has a resolution of 1e-7, muon's products one of 4e-3.
    rel = 5e-3 if "muon" in str(folder) else 1e-6
    assert [x[2] for x in ours] == pytest.approx([x[2] for x in theirs], rel=rel, abs=0), folder
    a, b = (checkpoints.latest(Path(path)).state for path in (one, folder))
    for count in ("step", "unimproved", "health"):
        assert a[count] == b[count], folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: ``CASE-1`` in one process, ``CASE-KIND`` in two, ``CASE-KIND-cut`` stopped in
    two, and ``CASE-KIND-N`` resumed from there in N."""
    folder = tmp_path_factory.mktemp("learned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSPAN_CACHE", str(folder / "cache"))
        patch.setattr(metrics, "plot", lambda *_: [])
        patch.chdir(folder)
        begin(patch)
        whole = [job(case, f"{case}-{kind}", kind) for case, kind in AS_ONE]
        whole.append(job("dropout", "dropout-ddp", "ddp"))
        cut = [job(case, f"{case}-{kind}-cut", kind, stop=CUT) for case, kind in RESUMED]
        resumed: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
        for (case, kind), numbers in RESUMED.items():
            for n in numbers:
                resumed[n].append(job(case, f"{case}-{kind}-{n}", copy=f"{case}-{kind}-cut"))
        for n, jobs in ((2, whole), (2, cut), (2, resumed[2]), (4, resumed[4])):
            together(n, jobs)
        for alone in [job(case, f"{case}-1", "ddp") for case in CASES] + resumed[1]:
            run(alone)
    return folder


@several
@pytest.mark.parametrize(("case", "kind"), AS_ONE)
def test_two_processes_learn_as_one(case: str, kind: str, learned: Path) -> None:
    """Every scored token has the same weight, whichever process scores it."""
    one = learned / f"{case}-1"
    two = learned / f"{case}-{kind}"
    assert_learns_as(one, two)
    state = checkpoints.latest(one).state
    found = losses(one)
    spoilt = case.startswith("spoilt")
    stopped = case == "early-stopping"
    assert state["health"] == dict.fromkeys(("skipped_updates", "reset_memory_rows"), int(spoilt))
    assert (state["step"], state["unimproved"]) == ((3, 2) if stopped else (STEPS, 0))
    assert len({step for step, *_ in found}) == state["step"] - spoilt
    if "optimiser" in CASES[case][2]:
        assert found[-1][-1] < found[0][-1] - 0.02
    elif not spoilt:
        weights = checkpoints.latest(one).load().weights
        for name, tensor in checkpoints.latest(two).load().weights.items():
            # AdamW divides by the gradient's size: where that is rounding, so is the quotient.
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


@several
@pytest.mark.parametrize(("case", "kind"), RESUMED)
def test_any_number_goes_on_where_two_were_stopped(case: str, kind: str, learned: Path) -> None:
    """Two bit for bit, and others as one process would."""
    whole = learned / f"{case}-{kind}"
    assert checkpoints.latest(Path(f"{whole}-cut")).state["step"] == CUT
    for n in RESUMED[case, kind]:
        if n == 2:
            assert losses(whole) == losses(f"{whole}-2")
            assert_same(whole, f"{whole}-2")
        else:
            assert_learns_as(learned / f"{case}-1", f"{whole}-{n}")


@several
def test_an_exported_run_of_several_processes_is_a_plain_run(learned: Path) -> None:
    def exported_names(name: str) -> set[str]:
        folder = Path(shutil.copytree(learned / name, name))
        cli.main(["export", name])
        memspan.load(name)
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        return {p.name for p in (*folder.iterdir(), *newest.iterdir())}

    # Scores are written where a training ends.
    ended = exported_names("compressive-1") - {"scores.json"}
    assert exported_names("compressive-ddp-cut") == ended
    run(job("compressive", "compressive-ddp-cut"))
    assert_learns_as("compressive-1", "compressive-ddp-cut")


@several
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_there(learned: Path) -> None:
    folder = Path(shutil.copytree(learned / "transformer-xl-fsdp-cut", "cut"))
    newest = folder / f"checkpoints/step-{CUT:08}/shards"
    shard = sorted(newest.iterdir())[0]
    harm(shard, "flipped")
    with pytest.raises(MemspanError, match=rf"{shard.name} is damaged.* continue from step 1"):
        start.resume(folder)
    shard.unlink()
    with pytest.raises(MemspanError, match=rf"{shard.name} is missing"):
        checkpoints.latest(folder).load()
    shutil.rmtree(newest.parent)
    run(job("transformer-xl", "cut"))
    assert_learns_as(learned / "transformer-xl-1", "cut")


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
    with pytest.raises(MemspanError, match="another process is training"), lock_run(Path("r")):
        pass
    again.send_signal(signal.SIGUSR1)
    assert again.ended(60) == (128 + signal.SIGUSR1, "")
    newest = checkpoints.latest(Path("r")).state["step"]
    # Its weights can be used without an export.
    assert memspan.load("r").step == newest


@several
def test_ctrl_c_ends_a_process_that_waits_for_another(tmp_path: Path) -> None:
    """It waits in C++, where an exception would wait with it."""
    meeting = tmp_path / "processes"
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}
    given = numbers | {"MASTER_ADDR": "127.0.0.1", BY_US: str(meeting)}
    command = [sys.executable, "-P", "-m", "memspan", "train", "--out", "r"]
    with subprocess.Popen(command, env=os.environ | given, stdout=subprocess.DEVNULL) as process:
        wait_for(meeting.exists, None)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


@several
def test_processes_end_with_their_launcher() -> None:
    """Or they would write on, beside the run that goes on from there."""
    launcher = Child("launcher", wait_with_a_child)
    pid = wait_for(lambda: Path("pid").exists() and Path("pid").read_text(), launcher)
    launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists(), None)


def launched(name: str, *arguments: str) -> Child:
    """``memspan train`` with two processes, by its own launcher."""
    # Torch 2.10 warns of its own code when it saves.
    environment = {"PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore:TypedStorage is deprecated"}
    return Child(name, cli.main, ["train", *arguments, "--nproc", "2"], **environment)


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
