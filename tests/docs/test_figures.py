"""The numbers that figures are drawn from: today's models give them, and other forms are refused."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import figures as written
import memspan
from docsite import figures
from docsite.errors import DocsError


def leaves(x: Any) -> Iterator[Any]:
    """Numbers and texts, in order, and lengths."""
    if isinstance(x, dict):
        yield from sorted(x)
        for key in sorted(x):
            yield from leaves(x[key])
    elif isinstance(x, list):
        yield len(x)
        for part in x:
            yield from leaves(part)
    else:
        yield x


@pytest.mark.parametrize("name", written.FIGURES)
def test_they_are_what_the_models_say(name: str) -> None:
    kept = figures.load(name)
    assert kept.pop("form") == written.FORM
    # Percent, hundredths of bits and thousandths, to rounding.
    fine = 0.02 if kept["kind"] == "attention" else 0.002
    pairs = [*zip(leaves(kept), leaves(written.FIGURES[name]()), strict=True)]
    for old, new in pairs:
        assert old == new or abs(old - new) <= (1 if isinstance(old, int) else fine)


@pytest.mark.parametrize(
    ("name", "place"),
    [("fast-weights", (written.LAYER, written.HEAD)), ("gated-delta-net", written.GATED)],
)
def test_the_writes_sum_up_to_the_models_matrix(name: str, place: tuple[int, int]) -> None:
    data, run = figures.load(name), memspan.load(f"shakespeare-{name}")
    with torch.no_grad():
        memory = run.model.backbone(run.model.embedding(written.tokens_of(run))).memory
    decay = torch.tensor([*data.get("decay", [1.0] * len(data["text"])), 1.0])
    left = decay.flip(0).cumprod(0).flip(0)[1:]
    matrix = torch.tensor(data["keys"]).T @ (left[:, None] * torch.tensor(data["written"]))
    expected = memory.weights[0, *place]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(matrix, expected, atol=0.05, rtol=0)


@dataclass
class Read:
    """What a token attends to: for each slot its first token, and its weight by layer."""

    token: int
    slots: list[int]
    compressed: int
    weights: list[list[int]]


def attended(name: str) -> list[Read]:
    """Tokens that attend to anything."""
    data, reads = figures.load(name), []
    for token, step in enumerate(data["steps"]):
        n, rate = step["compressed"], data["rate"]
        count = len(step["weights"][0])
        slots = [step["first"] + (rate * i if i < n else (rate - 1) * n + i) for i in range(count)]
        reads.append(Read(token, slots, n, step["weights"]))
    return [read for read in reads if read.slots]


def share(reads: list[Read], layer: int, counted: Callable[[Read], list[int]]) -> float:
    """Of a layer's attention, in percent, that on the slots ``counted``."""
    of_layer = [(read.weights[layer - 1], counted(read)) for read in reads]
    all_slots = sum(sum(weights) for weights, _ in of_layer)
    return 100 * sum(w[i] for w, slots in of_layer for i in slots) / all_slots


def near(read: Read) -> list[int]:
    return [i for i, slot in enumerate(read.slots) if read.token - slot <= 4]


def compressed(read: Read) -> list[int]:
    return [*range(read.compressed)]


def test_what_the_pages_say_of_them() -> None:
    """Percentages in the text below the figures are those of the numbers that are drawn."""
    xl = [share(attended("transformer-xl"), layer, near) for layer in (1, 4)]
    feedback = [share(attended("feedback"), layer, near) for layer in (1, 2)]
    full = [read for read in attended("compressive") if read.compressed == 12]
    old = [share(full, layer, compressed) for layer in (2, 4)]
    kept = figures.load("fast-weights")["kept"]
    left = [statistics.mean(row[-1 - lag] for row in kept[lag:]) for lag in (1, 10, 40)]
    gated = figures.load("gated-delta-net")
    fading = [statistics.mean(row[-1 - lag] for row in gated["kept"][lag:]) for lag in (1, 3, 10)]
    pairs = [*zip(gated["text"], gated["decay"], strict=True)]
    decays = [
        100 * statistics.mean(decay for letter, decay in pairs if is_one(letter))
        for is_one in (str.isalpha, " ".__eq__, ",".__eq__, ".!:".__contains__)
    ]
    said: dict[str, list[tuple[str, list[float]]]] = {
        "transformer_xl": [
            ("In layer 1, {} % of the attention stays within four bytes of the token", xl),
            ("in layer 4, {1} %", xl),
        ],
        "feedback": [("{} % in layer 1 and {} % in layer 2 stay within four bytes", feedback)],
        "compressive": [("they get {} % of layer 2's attention and {} % of layer 4's", old)],
        "fast_weights": [
            ("reads {} % of what it wrote after one more token, {} % after ten, {} %", left),
        ],
        "gated_delta_net": [
            (
                "{} % of what it wrote after one more token, {} % after three, {} % after ten",
                fading,
            ),
            ("leaves {} % of the matrix in the mean, a space {} %, a comma {} %", decays),
            ("or a colon, {3} %", decays),
        ],
    }
    for page, sentences in said.items():
        text = (figures.ROOT / f"docs/annotated/{page}.md").read_text(encoding="utf-8")
        for sentence, numbers in sentences:
            assert sentence.format(*(f"{n:.0f}" for n in numbers)) in " ".join(text.split())


def test_a_file_of_another_form(tmp_path: Path) -> None:
    folder = tmp_path / figures.FOLDER
    folder.mkdir(parents=True)
    for content, says in (
        (None, "is missing"),
        ("{", "no JSON"),
        ("[]", "form None"),
        (json.dumps({"form": 0}), f"form 0, not {figures.FORM}"),
    ):
        if content is not None:
            (folder / "it.json").write_text(content)
        with pytest.raises(
            DocsError, match=f"docs/figures/it.json.*{says}.*: make figures"
        ) as error:
            figures.load("it", tmp_path)
        assert "\n" not in str(error.value)
