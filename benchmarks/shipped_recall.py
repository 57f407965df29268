"""The trained runs that recall who is where: trained, stored in half precision, scored, described.

    python benchmarks/shipped_recall.py [--work runs/recall] [--only NAME ...]

Each is trained for a few minutes, with one seed, on the corpus `recall`; most of them have lessons
first (`recall_lessons.py`), because the corpus alone taught them too slowly. One that answers nearly
always where the answer is near goes to src/memspan/lab/trained with a card, its figures to
benchmarks/results/shipped-recall.json; of others the figures are printed: docs/guides/trained-runs.md
names them. What is finished in --work is not trained again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memspan
import recall_lessons
import timing
from memspan.files.tensors import SEAL, load_tensors, save_tensors
from memspan.lab.data.options import DataConfig
from memspan.lab.data.recall import FILLERS, LINES, NAMES, PLACES, QUESTIONS, SENTENCES, recall_text
from memspan.lab.runs.checkpoint_files import WEIGHTS
from memspan.lab.runs.options import RunConfig, load_config
from memspan.lab.runs.run import Run
from memspan.lab.training.options import OptimConfig, TrainConfig
from memspan.models import EmbeddingConfig
from memspan.models.registry import MODELS
from page_tables import DOCS, markdown
from shipped_runs import TRAINED, halved, sizes_of, trained, wrapped
from timing import machine

RESULTS = timing.RESULTS / "shipped-recall.json"
CARD = Path(__file__).with_name("shipped_recall.md")
"""The card of a run, with fields for its figures."""
EDGES = (0, 32, 64, 96, 128, 1000)
"""Distances in words between which right answers are counted for the table."""
BETWEEN = (0, 4, 8, 12, 14, 15, 16, 17, 18, 20, 24, 28, 30, 31, 32, 36, 40, 48, 56, 64)
"""Facts about other people between a fact and its question, for the plot."""
STORIES = 200
"""Stories for each of its points."""
PLOT = DOCS / "recall" / "recall-included.png"
BATCH = 16
LAYERS = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128}
LEARNED_POSITIONS = {"positions": "learned", "max_distance": 128}
"""They learn to look three words back sooner than with sinusoids."""


@dataclasses.dataclass(frozen=True)
class Lessons:
    """Training on scenes, see :func:`recall_lessons.teach`."""

    n_updates: int
    learning_rate: float
    good_enough: float = 0.3
    anew: bool = False
    mixed: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run: its model's options, and how long it is trained."""

    architecture: str
    steps: int
    learning_rate: float
    segment_length: int
    model: dict[str, Any]
    lessons: Lessons | None = None
    seed: int = 1


LESSONS = "lessons.json"
"""File with the figures of :func:`recall_lessons.teach`, in the folder of a taught run."""
LEARNED = 0.9
"""Share of right answers between the first two edges, from which a run ships."""
RECIPES = {
    "recall-transformer-xl": Recipe(
        "transformer-xl",
        1000,
        2e-3,
        64,
        LAYERS | {"memory_length": 64} | LEARNED_POSITIONS,
        Lessons(4500, 2e-3),
    ),
    # As many slots as above, of which half are of two words each.
    "recall-compressive": Recipe(
        "compressive",
        1000,
        2e-3,
        32,
        LAYERS
        | {"memory_length": 32, "compressed_length": 32, "compression_rate": 2}
        | LEARNED_POSITIONS,
        Lessons(10_000, 3e-3, 0.45, anew=True),
    ),
    "recall-feedback": Recipe(
        "feedback", 2000, 2e-3, 64, LAYERS | {"memory_length": 64}, Lessons(6000, 2e-3)
    ),
    "recall-fast-weights": Recipe(
        "fast-weights", 6000, 2e-3, 64, LAYERS, Lessons(34_000, 2e-3, mixed=24_000), seed=5
    ),
    "recall-gated-delta-net": Recipe(
        "gated-delta-net",
        2000,
        8e-3,
        64,
        {"n_layers": 1, "d_model": 64, "n_heads": 2, "d_head": 32, "d_ff": 128},
    ),
}


def config_of(name: str) -> RunConfig[Any]:
    """All options of its training."""
    recipe = RECIPES[name]
    return RunConfig(
        MODELS[recipe.architecture](**recipe.model),
        recipe.architecture,
        # As in examples/recall.py: what is read and what is predicted are learned apart.
        EmbeddingConfig(tie=False),
        DataConfig("recall", tokenizer="words"),
        OptimConfig(
            learning_rate=recipe.learning_rate, min_learning_rate=recipe.learning_rate / 20
        ),
        TrainConfig(
            steps=recipe.steps,
            batch_size=BATCH,
            segment_length=recipe.segment_length,
            evaluate_every=0,
            evaluate_tokens=0,
            seed=recipe.seed,
        ),
    )


def taught(name: str, work: Path) -> Path | None:
    """A run in ``work`` that has had the recipe's lessons; None: there are none."""
    lessons = RECIPES[name].lessons
    if lessons is None:
        return None
    folder = work / f"{name}-lessons"
    if folder.is_dir():
        return folder
    config = config_of(name)
    begun = work / f"{name}-begun"
    shutil.rmtree(begun, ignore_errors=True)
    # A run's files, with weights that one update with a rate of 0 leaves as they were.
    once = dataclasses.replace(config.train, steps=1)
    still = dataclasses.replace(config.optim, learning_rate=0.0, min_learning_rate=0.0)
    memspan.train(dataclasses.replace(config, train=once, optim=still), begun)
    run = memspan.load(begun)
    start = time.process_time()
    found = recall_lessons.teach(run, **dataclasses.asdict(lessons))
    found["cpu_seconds"] = round(time.process_time() - start, 1)
    _, header = load_tensors(begun / WEIGHTS)
    about = {key: value for key, value in header.items() if key != SEAL}
    save_tensors(begun / WEIGHTS, run.model.state_dict(), about)
    (begun / LESSONS).write_text(json.dumps(found) + "\n")
    begun.rename(folder)
    return folder


def taught_as(name: str, work: Path) -> dict[str, Any] | None:
    """Figures of the lessons and their CPU seconds; None: there were none."""
    found = work / f"{name}-lessons" / LESSONS
    return json.loads(found.read_text()) if found.is_file() else None


@torch.no_grad()
def answers(run: Run, n_sentences: int = SENTENCES["validation"]) -> list[tuple[int, bool]]:
    """Read the validation text in one stream: for each of its questions how many words ago the answer
    was told, and if the likeliest next word is the answer."""
    text = recall_text(n_sentences, list(SENTENCES).index("validation"))
    words = text.replace("\n", " <eos> ").split()
    ids = torch.from_numpy(np.asarray(run.tokenizer.encode(text.encode()), dtype=np.int64))
    length = run.config.train.segment_length
    memory: Any = None
    likeliest = []
    for segment in ids.split(length):
        out = run.model(segment[None], memory)
        memory = out.memory
        likeliest.append(out.logits[0].argmax(-1))
    predicted = torch.cat(likeliest).tolist()
    told: dict[str, int] = {}
    found = []
    for t, word in enumerate(words):
        if word.endswith("?"):
            found.append((t - told[word[:-1]], predicted[t] == ids[t + 1].item()))
        elif word in NAMES:
            # The place is the third word after the name.
            told[word] = t + 3
    return found


def story(between: int, seed: int, before: int = 0) -> tuple[str, str]:
    """So many words about other people, a fact, so many facts about others, and the question for the
    first fact; and its answer."""
    draw = random.Random(seed)
    name, *others = draw.sample(NAMES, len(NAMES))
    place = draw.choice(PLACES)

    def facts(n: int) -> list[str]:
        """Words of facts, four each."""
        told = (f"{draw.choice(others)} is in {draw.choice(PLACES)}." for _ in range(n))
        return " ".join(told).split()

    start = facts(-(-before // 4))
    words = [*start[len(start) - before :], name, "is", "in", f"{place}.", *facts(between)]
    return " ".join([*words, "Where", "is", f"{name}?"]), f"{place}."


@torch.no_grad()
def n_right(run: Run, stories: list[tuple[str, str]]) -> int:
    """The number of stories, of equally many words, that are answered rightly, each from an empty
    memory."""
    texts, places = zip(*stories, strict=True)
    ids = torch.tensor([run.tokenizer.encode(text.encode()).tolist() for text in texts])
    expected = torch.tensor([run.tokenizer.encode(place.encode())[0] for place in places])
    memory: Any = None
    for segment in ids.split(run.config.train.segment_length, dim=1):
        out = run.model(segment, memory)
        memory = out.memory
    return int((out.logits[:, -1].argmax(-1) == expected).sum())


def right_after(run: Run, between: int) -> float:
    """Share of right answers after so many facts about others."""
    stories = [story(between, seed) for seed in range(STORIES)]
    return round(n_right(run, stories) / STORIES, 4)


def shares(found: list[tuple[int, bool]]) -> list[float]:
    """The share of right answers between each two of :data:`EDGES`."""
    between = [
        [right for back, right in found if low < back <= high] for low, high in pairwise(EDGES)
    ]
    return [round(sum(each) / len(each), 4) for each in between]


def floors() -> dict[str, float]:
    """Perplexity per token of the validation text for readers who know how it is made: one who knows
    all answers, and one who knows none, to whom all places are as likely."""
    text = recall_text(SENTENCES["validation"], list(SENTENCES).index("validation"))
    names = list(NAMES)
    waiting: set[str] = set()
    nats = unknown = 0.0
    for sentence, end in re.findall(r"(\S[^.]*\.)(.)", text, flags=re.S):
        words = sentence.split()
        fact = 1 - FILLERS - (QUESTIONS if waiting else 0)
        if words[0] == "Where":
            name = words[2].rstrip("?")
            nats -= math.log(QUESTIONS / len(waiting))
            unknown += math.log(len(PLACES))
            waiting.remove(name)
        elif words[0] in NAMES:
            rank = names.index(words[0])
            moves = math.log((rank + 2) / (rank + 1)) / math.log(len(NAMES) + 1)
            nats -= math.log(fact * moves / len(PLACES))
            names.insert(0, names.pop(rank))
            waiting.add(words[0])
        else:
            nats -= math.log(FILLERS)
        nats -= math.log(LINES if end == "\n" else 1 - LINES)
    tokens = len(text.replace("\n", " <eos> ").split())
    ends = {"all answers": nats, "no answer": nats + unknown}
    return {reader: round(math.exp(sum_ / tokens), 3) for reader, sum_ in ends.items()}


def figures(name: str, work: Path) -> dict[str, Any]:
    """Score a shipped run, and say what it took."""
    run = memspan.load(TRAINED / name)
    nats = memspan.evaluate(run).nats_per_token
    return {
        "architecture": run.config.architecture,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "bytes": (run.folder / WEIGHTS).stat().st_size,
        "steps": run.step,
        "cpu_seconds": float((work / f"{name}.seconds").read_text()),
        "perplexity": round(math.exp(nats), 3),
        "right": shares(answers(run)),
        "curve": [right_after(run, between) for between in BETWEEN],
        "lessons": taught_as(name, work),
        "machine": machine(),
    }


def card(name: str, row: dict[str, Any]) -> str:
    """Describe a run for its users, in Markdown."""
    config = load_config(TRAINED / name)
    return wrapped(
        CARD.read_text().format(
            **(row["machine"] | row),
            name=name,
            read=config.train.batch_size * config.train.tokens_read(row["steps"]),
            seed=config.train.seed,
            sizes=sizes_of(config.model),
            answers=listed_shares(row["right"]),
            first=lessons_of(name, row),
            **{reader.replace(" ", "_"): value for reader, value in floors().items()},
        )
    )


def lessons_of(name: str, row: dict[str, Any]) -> str:
    """A sentence about the lessons that a run had first, or none."""
    lessons = RECIPES[name].lessons
    if lessons is None:
        return ""
    texts = "about two people at first and all twelve in the end"
    if lessons.mixed:
        texts = (
            f"about two to twelve people in the first {lessons.mixed:,} and all twelve after that"
        )
    return (
        f"Before that it had {lessons.n_updates:,} updates of lessons, in "
        f"{row['lessons']['cpu_seconds']:.0f} more seconds (`benchmarks/recall_lessons.py`): texts "
        f"{texts}, in which only answers are scored. "
    )


def listed_shares(right: list[float]) -> str:
    """Shares of right answers with the distances that they belong to."""
    parts = [
        f"{share:.0%} of the answers that were told {low + 1} to {high:,} words ago"
        for share, (low, high) in zip(right, pairwise(EDGES), strict=True)
    ]
    return ", ".join(parts)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The runs side by side, in Markdown; docs/guides/trained-runs.md has it."""
    heads = [f"{low + 1} to {high:,}" for low, high in pairwise(EDGES)]
    lines = [["run", "parameters", "bytes", "perplexity", f"right at {heads[0]} words", *heads[1:]]]
    for name, row in rows.items():
        sizes = [f"{row[field]:,}" for field in ("parameters", "bytes")]
        right = [f"{share:.0%}".replace("%", " %") for share in row["right"]]
        lines.append([f"`{name}`", *sizes, f"{row['perplexity']:.2f}", *right])
    return markdown(lines)


def plot(rows: dict[str, dict[str, Any]], path: Path = PLOT) -> None:
    """Draw right answers by the number of words since the answer was told, see :func:`right_after`."""
    import plots

    figure, (axes,) = plots.panels(1, 3.2)
    words = [4 * between + 3 for between in BETWEEN]
    for row in rows.values():
        name = row["architecture"]
        axes.plot(words, [100 * share for share in row["curve"]], label=name, **plots.look(name))
    axes.axhline(100 / len(PLACES), color="gray", linewidth=0.8)
    axes.annotate("guessing", (0, 100 / len(PLACES) + 2), va="bottom")
    axes.set_xlabel("words since the answer was told")
    axes.set_ylabel("right answers, %")
    axes.set_ylim(0, 104)
    plots.name_lines(figure, axes)
    plots.save(figure, path)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/recall"), help="where to train")
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        if not trained(name, config_of(name), options.work, taught(name, options.work)):
            return
        near, *far = shares(answers(memspan.load(options.work / name)))
        if near < LEARNED:
            print(f"{name} has not learned it: right answers {[near, *far]} between words {EDGES}")
            continue
        halved(options.work / name, TRAINED / name)
        row = figures(name, options.work)
        found = (json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}) | {name: row}
        found = {key: found[key] for key in RECIPES if key in found}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        (TRAINED / name / "README.md").write_text(card(name, row))
        print(table(found))
        plot(found)


if __name__ == "__main__":
    main()
