"""Pictures and moving figures, and the pages' words about them, are what the running models say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch

import asked
import figures as written
import memspan
import shipped_recall
import twelve_tokens
from docsite import figures
from docsite.errors import DocsError
from twelve_tokens import FOLDER, PICTURES, decays, left, slots_of

NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e-\d+)?)")


@pytest.mark.parametrize("name", written.FIGURES)
def test_figures_show_the_numbers_of_today(name: str) -> None:
    kept = figures.load(name)
    assert kept.pop("form") == written.FORM
    # Percent, hundredths of bits and thousandths, to rounding.
    fine = 0.02 if kept["kind"] == "attention" else 0.002
    old, new = (
        NUMBER.split(json.dumps(x, sort_keys=True)) for x in (kept, written.FIGURES[name]())
    )
    assert old[::2] == new[::2]
    for was, now in zip(old[1::2], new[1::2], strict=True):
        assert abs(float(was) - float(now)) <= (fine if "." in was + now else 1)


@pytest.mark.parametrize(
    ("name", "place"),
    [("fast-weights", (written.LAYER, written.HEAD)), ("gated-delta-net", written.GATED)],
)
def test_the_writes_sum_up_to_the_models_matrix(name: str, place: tuple[int, int]) -> None:
    data = figures.load(name)
    run = memspan.load(f"shakespeare-{name}")
    with torch.no_grad():
        memory = run.model.backbone(run.model.embedding(written.tokens_of(run))).memory
    decay = torch.tensor([*data.get("decay", [1.0] * len(data["text"])), 1.0])
    left = decay.flip(0).cumprod(0).flip(0)[1:]
    matrix = torch.tensor(data["keys"]).T @ (left[:, None] * torch.tensor(data["written"]))
    expected = memory.weights[0, *place]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(matrix, expected, atol=0.05, rtol=0)


def test_the_page_is_compared_with_what_the_model_says_today() -> None:
    kept = json.loads(asked.PATH.read_text(encoding="utf-8"))
    stories = asked.stories()
    assert [
        {key: row[key] for key in story} for story, row in zip(stories, kept, strict=True)
    ] == stories
    for row in kept:
        now = asked.answered(row["story"], row["asked"])
        assert now["words"] == row["words"]
        for part in ("logits", "shares"):
            assert now[part] == pytest.approx(row[part], abs=1e-4)
    page = (figures.ROOT / "docs/ask.md").read_text(encoding="utf-8")
    run = json.loads(shipped_recall.RESULTS.read_text(encoding="utf-8"))[asked.RUN]
    *near, far = run["right"]
    assert {*near} == {1.0}
    assert f"{far:.0%} beyond".replace("%", " %") in page
    assert f"{run['parameters']:,} parameters" in page
    assert f"{run['cpu_seconds']:.0f} CPU seconds" in page


def share(name: str, layer: int, compressed: int = 0) -> float:
    """Share of a layer's attention, in percent, on slots within four tokens; or on compressed slots, of
    the tokens that see so many."""
    counted = total = 0
    for token, step in enumerate(figures.load(name)["steps"]):
        if step["compressed"] == compressed:
            weights = step["weights"][layer - 1]
            first = 0 if compressed else max(0, token - step["first"] - 4)
            counted += sum(weights[first : compressed or None])
            total += sum(weights)
    return 100 * counted / total


def still_read(kept: list[list[float]], *lags: int) -> list[float]:
    """Mean share of a value that is still read after each number of tokens."""
    return [statistics.mean(row[-1 - lag] for row in kept[lag:]) for lag in lags]


def test_pages_describe_their_figures() -> None:
    """Percentages in the text below the figures are those of the numbers that are drawn."""
    delta = figures.load("fast-weights")
    gated = figures.load("gated-delta-net")
    pairs = [*zip(gated["text"], gated["decay"], strict=True)]
    decays = [
        100 * statistics.mean(decay for letter, decay in pairs if is_one(letter))
        for is_one in (str.isalpha, " ".__eq__, ",".__eq__, ".!:".__contains__)
    ]
    said: dict[str, tuple[list[float], *tuple[str, ...]]] = {
        "transformer_xl": (
            [share("transformer-xl", layer) for layer in (1, 4)],
            "In layer 1, {} % of the attention stays within four bytes of the token",
            "in layer 4, {} %",
        ),
        "feedback": (
            [share("feedback", layer) for layer in (1, 2)],
            "{} % in layer 1 and {} % in layer 2 stay within four bytes",
        ),
        "compressive": (
            [share("compressive", layer, compressed=12) for layer in (2, 4)],
            "they get {} % of layer 2's attention and {} % of layer 4's",
        ),
        "fast_weights": (
            still_read(delta["kept"], 1, 10, 40),
            "reads {} % of what it wrote after one more token, {} % after ten, {} %",
        ),
        "gated_delta_net": (
            [*still_read(gated["kept"], 1, 3, 10), *decays],
            "{} % of what it wrote after one more token, {} % after three, {} % after ten",
            "leaves {} % of the matrix on average, a space {} %, a comma {} %",
            "or a colon, {} %",
        ),
    }
    for page, (numbers, *sentences) in said.items():
        text = (figures.ROOT / f"docs/lessons/{page}.md").read_text(encoding="utf-8")
        whole = "\n".join(sentences).format(*(f"{n:.0f}" for n in numbers))
        for sentence in whole.splitlines():
            assert sentence in " ".join(text.split())


@pytest.mark.parametrize(
    ("content", "says"),
    {
        "": "is missing or no JSON",
        "{": "is missing or no JSON",
        "[]": "is of form None",
        '{"form": 0}': f"is of form 0, not {figures.FORM}",
    }.items(),
)
def test_a_file_of_another_form(tmp_path: Path, content: str, says: str) -> None:
    folder = tmp_path / figures.FOLDER
    folder.mkdir(parents=True)
    if content:
        (folder / "it.json").write_text(content)
    with pytest.raises(DocsError, match=rf"\Adocs/figures/it.json {says}.*: make figures\Z"):
        figures.load("it", tmp_path)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_path_are_of_today(name: str) -> None:
    """The pictures of docs/path.md."""
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name](), "make figures"


def test_no_other_picture_lies_there() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*PICTURES}


def test_slots_hold_the_tokens_that_the_figure_shows() -> None:
    segments = ["abcd", "efgh", "ijkl"]
    for name in ("transformer-xl", "compressive"):
        assert slots_of(name, "hidden", 0)[1:] == [[*tokens] for tokens in segments]
    assert slots_of("transformer-xl", "hidden", 1)[2] == ["abcde", "abcdef", "abcdefg", "abcdefgh"]
    assert slots_of("compressive", "compressed", 0)[1:] == [["", ""], ["ab", "cd"], ["ef", "gh"]]
    assert slots_of("feedback", "vectors")[3][-1] == twelve_tokens.TOKENS


def test_retention_in_the_figure_matches_the_matrix() -> None:
    assert left("sum") == [[100] * n for n in (4, 8, 12)]
    delta = left("delta")[-1]
    gated = left("gated-delta")[-1]
    # A key that meets a later one loses more than the decays alone.
    kept = 100.0
    for share, alpha in zip(reversed(gated), [100, *reversed(decays("gated-delta"))], strict=False):
        kept *= alpha / 100
        assert share <= kept + 1
    assert delta[-1] == gated[-1] == 100
    assert min(delta) == 20
    assert gated[:4] == [0] * 4
    assert gated == sorted(gated)
