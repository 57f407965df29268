"""What a dry run says of a run, and what it refuses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import refused
from memspan import cli
from memspan.commands.train import train
from memspan.data.options import DataConfig
from memspan.data.tokenizers.characters import CharacterTokenizer
from memspan.distributed import reports
from memspan.errors import MemspanError
from memspan.models import LanguageModel, sizes
from memspan.models.registry import MODELS
from memspan.models.transformer.config import TransformerConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig
from memspan.training import estimate as estimates
from memspan.training import start
from memspan.training.estimate import estimate, vocabulary
from memspan.training.options import TrainConfig
from memspan.training.sizes import Plan, Sampled, Tally, line
from memspan.training.updates import Updater

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_architecture.py"
TRAIN = TrainConfig(steps=10, batch_size=4, segment_length=8, device="cpu")
SMALL = ["--train.batch-size", "4", "--train.segment-length", "8", "--train.device", "cpu"]
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("own_folders")


def tiny(architecture: str, **options: Any) -> RunConfig[Any]:
    kind = MODELS[architecture]
    names = {field.name for field in dataclasses.fields(kind)}
    wanted = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 32, "memory_length": 8}
    model = kind(**{name: value for name, value in wanted.items() if name in names})
    return RunConfig(model, architecture, train=dataclasses.replace(TRAIN, **options))


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes a second for each row of each layer."""

    def seconds(updater: Updater) -> float:
        return updater.state.config.model.n_layers * len(updater.state.memory.tokens_seen)

    monkeypatch.setattr(estimates, "_seconds", seconds)
    monkeypatch.setattr(estimates, "LONGEST_UPDATE", 1e9)


@pytest.mark.parametrize("architecture", MODELS)
def test_counts_are_those_of_the_model(architecture: str, untimed: None) -> None:
    found = estimate(tiny(architecture))
    model = LanguageModel(256, tiny(architecture).model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.needs.weights == 4 * found.parameters
    assert found.needs.memory == 2 * model.initial_memory(4).nbytes
    assert found.tokens == 10 * 4 * 8
    # Each of the backbone's matrices at least once, forward and twice backward.
    matrices = [p for p in model.backbone.parameters() if p.dim() > 1]
    used = sum(p.numel() for p in matrices if p.shape[-1] in (16, 32))
    assert found.flops_per_token > 6 * used * (architecture != "compressive")
    assert not list(Path().iterdir())


def test_products_are_all_counted() -> None:
    model = TransformerConfig(n_layers=1, d_model=16, n_heads=2, d_ff=32)
    config: RunConfig[Any] = RunConfig(model, "transformer", train=TRAIN)
    attention = 2 * 2 * 8 * 16
    products = 2 * (4 * 16 * 16 + 2 * 16 * 32) + attention + 2 * 16 * 256
    assert Plan(config, 256, CPU).sampled().operations == {1: products}


@pytest.mark.parametrize("segments", [1, 3])
def test_activations_grow_linearly(segments: int) -> None:
    """What samples say of many layers, rows and segments is what tensors then take."""
    loop: Any = {"accumulate": 3, "gradient_segments": segments, "segment_length": 32}
    taken = {}
    for recompute in (False, True):
        config = tiny("transformer-xl", recompute=recompute, **loop)
        model = dataclasses.replace(config.model, n_layers=6, memory_length=32, dropout=0.1)
        plan = Plan(dataclasses.replace(config, model=model), 256, CPU)
        updater = plan.updater(4)
        updater.update()
        with Tally() as counted:
            updater.update()
        taken[recompute] = counted.peak
        assert plan.sampled().activations(6, 4) == pytest.approx(counted.peak, rel=0.1)
    assert taken[True] < taken[False] / (2 + segments)
    assert line({1: 3.0, 2: 5.0}, 10) == 21
    assert line({2: 3.0}, 10) == 15


def test_what_is_slow_is_timed_in_part(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {2: {1: 0.0}, 3: {1: 0.0}}
    monkeypatch.setattr(Plan, "sampled", lambda _: Sampled(none, {2: 5.0, 3: 7.5}))
    config = tiny("lstm", batch_size=12)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=4))
    for longest, probe in (
        (48, "updates of the model itself"),
        (20, "updates of the model itself with 4 of its 12 rows"),
        (2, "updates of 3 of the 4 layers with 1 of 12 rows, scaled"),
    ):
        monkeypatch.setattr(estimates, "LONGEST_UPDATE", longest)
        found = estimate(config)
        assert found.probe == probe
        # Eight tokens of a row in four seconds, one for each layer.
        assert found.tokens_per_second == pytest.approx(8 / 4)
        assert found.seconds == pytest.approx(10 * 12 * 4)
    assert estimate(config, n_processes=3).tokens_per_second == pytest.approx(6)


def test_processes_share_what_training_shares(untimed: None) -> None:
    config = tiny("transformer-xl")
    one, ddp = estimate(config), estimate(config, n_processes=2)
    assert "times 2" in ddp.probe
    assert ddp.needs.weights == one.needs.weights
    assert ddp.needs.gradients == 2 * one.needs.gradients
    assert ddp.needs.memory * 2 == one.needs.memory
    sharded = dataclasses.replace(config, train=dataclasses.replace(TRAIN, parallel="fsdp"))
    assert estimate(sharded, n_processes=2).needs.moments * 2 == one.needs.moments
    for wrong, words in ((3, "cannot be shared by 3 processes evenly"), (1, "add --nproc")):
        with pytest.raises(MemspanError, match=words):
            estimate(sharded, n_processes=wrong)


def test_what_saves_take_on_top() -> None:
    wide = dataclasses.replace(tiny("transformer-xl"), model=TransformerXLConfig(d_model=2048))
    sharded = dataclasses.replace(wide, train=dataclasses.replace(TRAIN, parallel="fsdp"))
    found = [
        Plan(config, 256, CPU, n).needs(2)
        for config, n in ((wide, 1), (wide, 2), (wide, 4), (sharded, 4))
    ]
    # One process writes its tensors as they are; of several, each copies its state, and its part twice.
    assert found[0].saving == 0
    for need, copies in zip(found[1:], (1 + 2 / 2, 1 + 2 / 4, 3 / 4), strict=True):
        state = found[0].weights + found[0].moments
        assert need.saving == copies * state + 2 * need.memory
    assert Plan(wide, 256, torch.device("cuda"), 4).needs(2).saving == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_no_number_of_processes(wrong: Any) -> None:
    with pytest.raises(MemspanError, match="n_processes must be an integer of at least 1"):
        estimate(tiny("lstm"), n_processes=wrong)


def test_a_vocabulary_that_would_take_a_download() -> None:
    assert vocabulary(DataConfig("wikitext-103", "words", vocab_size=1000)) == 1000
    assert vocabulary(DataConfig("wikitext-103", "bytes")) == 256
    CharacterTokenizer("abc").save(Path())
    assert vocabulary(DataConfig("wikitext-103", "tokenizer.json")) == 4
    for tokenizer in ("words", "characters"):
        with pytest.raises(MemspanError, match="is not known before the text is here"):
            vocabulary(DataConfig("wikitext-103", tokenizer))
    Path("text.txt").write_text("one two three " * 30)
    assert vocabulary(DataConfig("text.txt", "words")) == 5


@pytest.mark.usefixtures("own_architectures")
def test_the_command_line_reports(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(EXAMPLE, "own_architecture.py")
    start = ["train", "--dry-run", "--import", "own_architecture"]
    cli.main([*start, "--model", "gated-recurrence", *SMALL])
    said = capsys.readouterr().out
    for words in (
        "parameters",
        "at the peak (weights",
        "FLOPs per token",
        "tokens/s",
        "minutes for",
    ):
        assert words in said
    assert [path.name for path in Path().iterdir() if path.is_dir()] in ([], ["__pycache__"])


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry-run", "train"])
def test_what_does_not_fit_is_refused(
    dry: list[str],
    untimed: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("text.txt").write_text("some text " * 500)
    # The weights would fit, and the sample; not all layers' activations.
    monkeypatch.setattr(sizes, "_machine_memory", lambda: 4e8)
    large = ["--model.n-layers", "40", "--train.batch-size", "16", "--train.segment-length", "64"]
    said = refused(
        capsys, "train", *dry, "--data.corpus", "text.txt", *large, "--train.device", "cpu"
    )
    assert "training would take" in said
    assert "lower batch_size" in said
    assert not Path("runs").exists()


def test_contradictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert "drop --data.corpus -" in refused(capsys, "train", "--dry-run", "--data.corpus", "-")
    assert "--resume" in refused(capsys, "train", "--dry-run", "--resume", "shakespeare")


@pytest.mark.parametrize("number", ["2", "4096"])
def test_torchrun_with_more_processes(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "is_worker", lambda: True)
    with pytest.raises(MemspanError, match="torchrun has already started some: drop one of them"):
        train(["--dry-run", "--nproc", number])


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model.n-layers", 10**9),
        ("--model.d-model", 10**18),
        ("--model.d-ff", 10**9),
        ("--model.memory-length", 10**15),
        ("--train.segment-length", 10**10),
    ],
)
def test_a_sample_that_does_not_fit(
    flag: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "lower" in refused(
        capsys, "train", "--dry-run", "--train.device", "cpu", flag, str(value)
    )


def test_disk_is_that_of_the_checkpoints_that_stay(untimed: None) -> None:
    """As many as there are at once, and not much less than one has."""
    Path("text.txt").write_text("some text " * 500)
    loop = {"steps": 12, "save_every": 2, "evaluate_every": 3, "evaluate_tokens": 64}
    for keep, n in ((0, 9), (1, 3), (2, 4), (50, 9)):
        assert estimate(tiny("transformer-xl", keep=keep, **loop)).checkpoints == n
    config = tiny("transformer-xl", keep=0, sample_tokens=0, **loop)
    config = dataclasses.replace(config, data=DataConfig("text.txt"))
    found = estimate(config)
    start.train(config, Path("r"))
    files = list(Path("r/checkpoints").glob("step-*/*.safetensors"))
    # Every even step, and any validation that was better.
    assert 6 <= len(files) / 2 <= 9
    used = sum(path.stat().st_size for path in files) / (len(files) / 2)
    assert used == pytest.approx(found.disk / found.checkpoints, rel=0.25)
    assert estimate(config, n_processes=2).disk == 2 * found.disk
