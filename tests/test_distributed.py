"""Several processes: the same losses as one, shared checkpoints that any number of processes resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memspan
from memspan import train
from memspan.config import (
    CompressiveConfig,
    DataConfig,
    EmbeddingConfig,
    FastWeightsConfig,
    FeedbackConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
)
from memspan.config_files import to_toml
from several_processes import run

SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24}
ADAPTIVE = EmbeddingConfig(cutoffs=(3, 6), div_val=2, d_embed=8)
MODELS: dict[str, tuple[Any, EmbeddingConfig, dict[str, int]]] = {
    # Tied and adaptive embeddings, gradients through several segments, a growing batch.
    "transformer-xl": (TransformerXLConfig(**SMALL, memory_length=8), ADAPTIVE, {"accumulate": 3}),
    "compressive": (
        CompressiveConfig(**SMALL, memory_length=8, compressed_length=4, compression_rate=2),
        EmbeddingConfig(),
        {"accumulate": 2, "gradient_segments": 2},
    ),
    "feedback": (FeedbackConfig(**SMALL, memory_length=8), EmbeddingConfig(), {}),
    "fast-weights": (FastWeightsConfig(**SMALL), EmbeddingConfig(tie=False), {}),
}
KINDS = ("ddp", "fsdp")
STEPS, CUT = 9, 5


def config(name: str, kind: str = "ddp", **loop: Any) -> RunConfig[Any]:
    model, embedding, more = MODELS[name]
    settings: dict[str, Any] = {"steps": STEPS, "batch_size": 4, "segment_length": 6}
    settings |= {"evaluate_every": 4, "evaluate_tokens": 90, "save_every": 3, "sample_tokens": 4}
    return RunConfig(
        model=model,
        architecture=name,  # type: ignore[arg-type]
        embedding=embedding,
        data=DataConfig(corpus="text.txt", tokenizer="characters", document_reset=True),
        optim=OptimConfig(warmup_steps=2, clip_norm=0.5),
        train=TrainConfig(**settings | more | loop, device="cpu", parallel=kind),  # type: ignore[arg-type]
    )


def write(options: RunConfig[Any], name: str) -> str:
    Path(name).write_text(to_toml(options))
    return name


def environment() -> dict[str, str]:
    source = str(Path(memspan.__file__).parents[1])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def torchrun(n_processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    # A port that the system finds: tests run side by side.
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(n_processes)]
    return subprocess.run(
        [sys.executable, *launcher, *command], env=environment(), capture_output=True, text=True
    )


def together(n_processes: int, jobs: list[dict[str, Any]]) -> None:
    Path("jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("several_processes.py")
    done = torchrun(n_processes, str(script), "jobs.json")
    assert done.returncode == 0, done.stderr


def losses(folder: Path) -> list[tuple[int, str, float]]:
    wanted = ("train_nats_per_token", "validation_nats_per_token")
    return [
        (record["step"], name, record[name])
        for record in train.metrics.read(folder / "metrics.jsonl")
        for name in wanted
        if name in record
    ]


def assert_same_losses(a: Path, b: Path) -> None:
    ours, theirs = losses(a), losses(b)
    assert [x[:2] for x in ours] == [x[:2] for x in theirs]
    assert len({step for step, *_ in ours}) == STEPS
    assert [x[2] for x in ours] == pytest.approx([x[2] for x in theirs], rel=3e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture: by one process; by two, whole and cut short, replicated and sharded."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("MEMSPAN_CACHE", str(home / "cache"))
        patch.setattr(train, "LOG_EVERY", 1)
        prose(home)
        jobs = []
        for name in MODELS:
            options = write(config(name), f"{name}.toml")
            run({"config": options, "folder": f"{name}-1"})
            for kind in KINDS:
                options = write(config(name, kind), f"{name}-{kind}.toml")
                jobs += [
                    {"config": options, "folder": f"{name}-{kind}-2"},
                    {"config": options, "folder": f"{name}-{kind}-cut", "stop": CUT},
                ]
        together(2, jobs)
        for name in MODELS:
            for kind in KINDS:
                for n in (1, 2, 4):
                    shutil.copytree(f"{name}-{kind}-cut", f"{name}-{kind}-cut-{n}")
                run({"folder": f"{name}-{kind}-cut-1"})
        for n in (2, 4):
            together(n, [{"folder": f"{m}-{kind}-cut-{n}"} for m in MODELS for kind in KINDS])
    return home


def prose(folder: Path) -> None:
    sentence = "what was read is kept, and what is kept is read again; "
    (folder / "text.txt").write_text("\n\n".join(sentence[: 9 + n % 40] for n in range(90)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_learn_as_one(name: str, kind: str, runs: Path) -> None:
    assert_same_losses(runs / f"{name}-1", runs / f"{name}-{kind}-2")


@pytest.mark.parametrize("n_processes", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_any_number_goes_on(name: str, kind: str, n_processes: int, runs: Path) -> None:
    """What two processes saved, one, two and four resume, as if it had not been cut."""
    assert_same_losses(runs / f"{name}-1", runs / f"{name}-{kind}-cut-{n_processes}")
