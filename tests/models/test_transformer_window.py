"""A sliding window over a model without memory: what a token sees, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memspan
from command_line import SMALL, refused
from memspan.errors import MemspanError
from memspan.lab import cli
from memspan.memory import concatenate
from memspan.models import LanguageModel
from memspan.models.transformer.config import TransformerConfig
from readings import assert_memories_equal

WINDOW = 6
SMALL_TRANSFORMER = ["--model", "transformer", *SMALL]
del SMALL_TRANSFORMER[(at := SMALL_TRANSFORMER.index("--model.memory-length")) : at + 2]


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(11, TransformerConfig(n_layers=2, d_model=8, n_heads=2, d_ff=12)).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(11, (2, 41), generator=torch.Generator().manual_seed(2))


def _alone(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """The logits after ``tokens``, read in one pass from nothing."""
    with torch.no_grad():
        return model(tokens).logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 2, 4, 6, 9])
def test_each_token_sees_what_is_in_its_window(
    model: LanguageModel, tokens: torch.Tensor, stride: int
) -> None:
    """From where its document begins, and no padding: segments have neither, documents or padding."""
    memory = model.reader(batch_size=2, window=WINDOW).memory
    texts: list[list[int]] = [[], []]
    for n, part in enumerate(tokens.split(stride, 1)):
        length = part.shape[1]
        kind = ("plain", "documents", "left", "right")[n % 4]
        lengths = [length, length]
        starts = part < 0
        options = {}
        if kind == "documents":
            starts = (part + n) % 4 == 0
            options = {"starts": starts}
        elif kind != "plain":
            lengths[n // 4 % 2] = n % (length + 1)
            options = {"lengths": torch.tensor(lengths), "padding": kind}
        reader = model.reader(memory)
        out = model(part, memory, **options)
        for row, text in enumerate(texts):
            visible = text[-(WINDOW - length) :] if length < WINDOW else []
            first = length - lengths[row] if kind == "left" else 0
            for column in range(first, first + lengths[row]):
                if starts[row, column]:
                    text = []
                    visible = []
                text, visible = ([*each, int(part[row, column])] for each in (text, visible))
                expected = _alone(model, torch.tensor([visible]))[0]
                torch.testing.assert_close(out.logits[row, column], expected)
            texts[row] = text
        memory = out.memory
        assert memory.tokens_seen.tolist() == [*map(len, texts)]
        if kind in ("plain", "documents"):
            torch.testing.assert_close(reader.read(part, **options), out.logits)
            assert_memories_equal(reader.memory, memory)


def test_a_window_is_a_memory(model: LanguageModel, tokens: torch.Tensor, tmp_path: Path) -> None:
    reader = model.reader(batch_size=2, window=WINDOW)
    reader.read(tokens[:, :9])
    both = concatenate([reader.memory[1], reader.memory[0]])
    both.save(tmp_path / "a.memory", model.fingerprint())
    loaded = model.load_memory(tmp_path / "a.memory", 2)
    torch.testing.assert_close(
        model.reader(loaded).read(tokens[[1, 0], 9:10])[:, 0], _alone(model, tokens[[1, 0], 4:10])
    )
    # A shorter window from a longer one, and a longer one, whose first slots are empty.
    shorter = model.reader(loaded, window=3).read(tokens[[1, 0], 9:10])[:, 0]
    torch.testing.assert_close(shorter, _alone(model, tokens[[1, 0], 7:10]))
    longer = model.reader(loaded, window=9)
    longer.read(tokens[[1, 0], 9:10])
    logits = longer.read(tokens[[1, 0], 10:11])[:, 0]
    torch.testing.assert_close(logits, _alone(model, tokens[[1, 0], 4:11]))
    with pytest.raises(MemspanError, match=r"a window of .* lower --window"):
        model.reader(window=10**15)


@pytest.mark.usefixtures("own_folders")
def test_runs_score_and_write_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 40)
    cli.main(["train", "--data.corpus", "text.txt", "--out", "run", *SMALL_TRANSFORMER])
    run = memspan.load("run")
    for window, says in (
        ([], "segment 8, no memory: each token sees 0 to 7 before it"),
        (["--window", "8"], "segment 4, window 8, no memory: each token sees 4 to 7 before it"),
        (["--window", "8", "--segment-length", "1", "--json"], '"reading": {"window": 8}'),
    ):
        capsys.readouterr()
        cli.main(["evaluate", "run", *window])
        assert says in " ".join(capsys.readouterr().out.split())
    # Written with the window of training: as reading on without it cannot.
    written = memspan.generate(run, "the quick brown", tokens=6, sampling=memspan.Sampling(0))
    text = run.tokenizer.encode(b"the quick brown").tolist()
    for token in written.tokens[0]:
        logits = _alone(run.model, torch.tensor([text[-8:]]))
        assert token == int(logits.argmax())
        text.append(token)
    cli.main(["generate", "run", "--tokens", "3", "--save-memory", "a.memory"])
    cli.main(["generate", "run", "--tokens", "3", "--memory", "a.memory", "--window", "4"])
    assert "window must be at least 1" in refused(capsys, "evaluate", "run", "--window", "0")
    line = refused(capsys, "evaluate", "shakespeare", "--window", "9")
    assert "window is not an option" in line
