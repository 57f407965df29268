"""How far back does it remember? Every architecture on one task, with the edges that theory predicts.

    python examples/recall.py time                 # panel A: 100 CPU seconds of training each
    python examples/recall.py level                # panel B: until it is right within its reach
    python examples/recall.py keys                 # panel C: accuracy against the number of keys
    python examples/recall.py pictures             # draw what is there

The task is in `memspan.data.synthetic.recall`; docs/recall.md explains it and the edges. All models
have about as many parameters, and the same optimiser, schedule and curriculum: distances are
log-uniform up to 16 at first, and up to 4,096 from the 500th update on. Each model's learning rate is
the best of three, tried with seed 0 before its first run, for 50 seconds each. Time is the CPU
time of updates, one thread per run; drawing the task's tokens is not counted. In panel B a run ends
when 95 % of the last 10,000 questions about writes in direct reach were answered with p > ½, or at
the limit.

Scores are of 32 new streams, after as many tokens as the longest distance. Runs that are in the
JSON file are not repeated, so that the script can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memspan.data.synthetic.recall import Recall
from memspan.models import (
    BackboneConfig,
    CompressiveConfig,
    EmbeddingConfig,
    FastWeightsConfig,
    FeedbackConfig,
    LanguageModel,
    LSTMConfig,
    TransformerConfig,
    TransformerXLConfig,
)

N_LAYERS, WIDTH = 2, 64
SEGMENT, MEMORY, COMPRESSED, RATE = 64, 128, 128, 4
"""T, M (Feedback's span S, too), C and c."""
ROWS = 16
RATES, TRIAL = (2e-3, 4e-3, 8e-3), 50.0
"""Learning rates that are tried, and the CPU seconds of a trial."""
SHORTEST, CURRICULUM = 16, 500
"""The curriculum's first longest distance, and the number of updates in which that grows."""
LEVEL, LAST_QUESTIONS = 0.95, 10_000
TEST_ROWS, TEST_SEED = 32, 1_000_000
UNLIMITED = math.inf


@dataclass(frozen=True)
class Contestant:
    """A model to be made with any inner width, and what theory says about it."""

    config: Callable[[int], BackboneConfig]
    colour: str
    label: str
    reach: float
    """Direct reach in tokens, at a segment's first token."""
    grows: bool
    """Whether the reach is longer later in a segment."""
    line: str = "-"
    main: bool = True
    """Whether its line is a thick one."""


def _sizes(width: int) -> dict[str, Any]:
    return {"n_layers": N_LAYERS, "d_model": WIDTH, "n_heads": 4, "d_ff": width}


def _compressive(function: str) -> Contestant:
    def config(width: int) -> BackboneConfig:
        return CompressiveConfig(
            **_sizes(width),
            memory_length=MEMORY,
            compressed_length=COMPRESSED,
            compression_rate=RATE,
            compression=function,  # type: ignore[arg-type]
            positions="learned",
        ).for_segments(SEGMENT)

    # Colours and lines of their own: in the picture of variants they lie close to one another.
    colour, line = {
        "convolution": ("#C07C00", "-"),
        "dilated-convolution": ("#5B4A12", "--"),
        "mean": ("#B5485D", "-."),
        "max": ("#3E6C96", ":"),
        "most-used": ("#3F7D4E", "-"),
    }[function]
    return Contestant(
        config,
        colour,
        f"Compressive, {function.replace('-convolution', '')}",
        MEMORY + RATE * COMPRESSED,
        grows=True,
        line=line,
        main=function == "convolution",
    )


def _fast_weights(rule: str, nu: int) -> Contestant:
    def config(width: int) -> BackboneConfig:
        # A sum grows without end, so what is read is divided by the sum of all keys, as in the paper.
        return FastWeightsConfig(
            **_sizes(width),
            rule=rule,  # type: ignore[arg-type]
            nu=nu,
            normalisation="sum" if rule == "delta" else "attention",
        )

    label = f"Fast Weights, {rule}" + (f", {nu * WIDTH // 2} features" if nu != 2 else "")
    line = "--" if nu != 2 else "-" if rule == "delta" else ":"
    return Contestant(config, "#D55E00", label, UNLIMITED, False, line, main=line == "-")


CONTESTANTS = {
    "transformer-xl": Contestant(
        lambda width: TransformerXLConfig(
            **_sizes(width), memory_length=MEMORY, positions="learned"
        ).for_segments(SEGMENT),
        "#0072B2", "Transformer-XL", MEMORY, True,
    ),
    **{
        f"compressive-{function}": _compressive(function)
        for function in ("mean", "convolution", "dilated-convolution", "max", "most-used")
    },
    "feedback": Contestant(
        lambda width: FeedbackConfig(**_sizes(width), memory_length=MEMORY),
        "#009E73", "Feedback", MEMORY, False,
    ),
    "fast-weights-delta": _fast_weights("delta", 2),
    "fast-weights-sum": _fast_weights("sum", 2),
    "fast-weights-delta-32": _fast_weights("delta", 1),
    "transformer": Contestant(
        lambda width: TransformerConfig(**_sizes(width)),
        "#666666", "Transformer, no memory", 0, True,
    ),
    "lstm": Contestant(
        lambda width: LSTMConfig(n_layers=N_LAYERS, d_model=width),
        "#A6508A", "LSTM", UNLIMITED, False,
    ),
}  # fmt: skip
EDGES = (
    ("T", SEGMENT, "#666666"),
    ("S", MEMORY, "#009E73"),
    ("M + T", MEMORY + SEGMENT, "#0072B2"),
    (f"{N_LAYERS} M + T", N_LAYERS * MEMORY + SEGMENT, "#0072B2"),
    ("M + c C", MEMORY + RATE * COMPRESSED, "#C07C00"),
)
"""What theory says about distances; drawn in."""
FEATURES = (("32 features", 32, "#D55E00"), ("64 features", 64, "#D55E00"))
"""The same about the number of keys, for one head of Fast Weights."""


@dataclass(frozen=True)
class Panel:
    """What is trained and scored."""

    task: Recall
    models: tuple[str, ...]
    live: tuple[int, ...]
    """Numbers of live keys, in turn among the rows."""
    distances: tuple[int, int] = (1, 4096)
    """Scored: from, up to."""


_ALL = tuple(name for name in CONTESTANTS if name != "fast-weights-delta-32")
_OVER_DISTANCE = Panel(Recall(), _ALL, (16,))
PANELS = {
    "time": _OVER_DISTANCE,
    "level": _OVER_DISTANCE,
    # Distances that every memory covers directly.
    "keys": Panel(
        Recall(n_keys=128, n_values=4, longest=512),
        ("transformer-xl", "compressive-mean", "feedback", "fast-weights-delta",
         "fast-weights-delta-32", "fast-weights-sum", "lstm"),
        (4, 8, 16, 32, 64, 128),
        (64, 128),
    ),
}  # fmt: skip


# ----- Training


def model_of(config: BackboneConfig, vocab_size: int) -> LanguageModel:
    # What is read is never an answer: with tied tables, all that is read would be pushed away from
    # answers alike, and become alike.
    return LanguageModel(vocab_size, config, EmbeddingConfig(tie=False))


def n_parameters(config: BackboneConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_of(config, vocab_size).parameters())


def config_of(name: str, vocab_size: int) -> BackboneConfig:
    """The contestant with as many parameters as Transformer-XL with the usual inner width."""
    make = CONTESTANTS[name].config
    wanted = n_parameters(CONTESTANTS["transformer-xl"].config(4 * WIDTH), vocab_size)
    widths = range(8, 8 * WIDTH)
    at = bisect_left(widths, wanted, key=lambda width: n_parameters(make(width), vocab_size))
    near = [make(width) for width in widths[max(at - 1, 0) : at + 1]]
    return min(near, key=lambda config: abs(n_parameters(config, vocab_size) - wanted))


def in_reach(name: str, distances: Tensor, places: Tensor) -> Tensor:
    """Where the write asked for is in direct reach, from questions' places in their segments."""
    model = CONTESTANTS[name]
    return distances <= model.reach + (places if model.grows else 0)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train one model, score it and return a row."""
    torch.set_num_threads(1)
    name, panel, seconds = job["model"], PANELS.get(job["panel"], _OVER_DISTANCE), job["seconds"]
    torch.manual_seed(job["seed"])
    vocab_size = panel.task.vocab_size
    model = model_of(config_of(name, vocab_size), vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rate"], betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    live = [panel.live[row % len(panel.live)] for row in range(ROWS)]
    stream = panel.task.stream(ROWS, job["seed"], live)
    memory = model.initial_memory(ROWS)
    last: deque[Tensor] = deque()
    clock, step = 0.0, 0
    while clock < seconds:
        grown = min(1.0, step / CURRICULUM)
        longest = int(SHORTEST * (panel.task.longest / SHORTEST) ** grown)
        segment = stream.next(SEGMENT, longest)
        start = time.process_time()
        out = model(segment.tokens, memory, targets=segment.targets)
        memory = out.memory.detach()
        out.loss.backward()
        for group in model.clip_groups():
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        # Constant for half of the time, then down to a twentieth.
        optimizer.param_groups[0]["lr"] = job["rate"] * min(
            1.0, (step + 1) / 50, 2 * (1.025 - clock / seconds)
        )
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        clock += time.process_time() - start
        full = job["panel"] == "level" and grown == 1
        if full and learned(name, segment.distances, out.losses, last):
            break
    found = score(model, name, panel)
    read = step * ROWS * SEGMENT
    parameters = sum(p.numel() for p in model.parameters())
    return job | {"cpu_seconds": round(clock, 1), "tokens": read, "parameters": parameters} | found


def learned(name: str, distances: Tensor, losses: Tensor | None, last: deque[Tensor]) -> bool:
    """Whether the last questions in reach, kept in ``last``, are answered well enough."""
    assert losses is not None
    asked = (distances > 0) & in_reach(name, distances, torch.arange(SEGMENT))
    last.append(losses.detach()[asked] < math.log(2))
    while sum(map(len, last)) - len(last[0]) >= LAST_QUESTIONS:
        last.popleft()
    right = torch.cat(list(last))
    return len(right) >= LAST_QUESTIONS and right.float().mean().item() >= LEVEL


@torch.no_grad()
def score(model: LanguageModel, name: str, panel: Panel) -> dict[str, Any]:
    """Accuracy by distance, or by the number of live keys where that varies; and within reach."""
    model.eval()
    curve, within = [], []
    for live in panel.live:
        distances, places, right = answers(model, panel.task, live)
        within.append(right[in_reach(name, distances, places)])
        if len(panel.live) > 1:
            low, high = panel.distances
            there = (low <= distances) & (distances <= high)
            curve.append((live, right[there].mean().item()))
            continue
        half_octave = (2 * distances.double().log2()).floor().int()
        for i in half_octave.unique().tolist():
            here = half_octave == i
            middle = distances[here].double().log2().mean().exp2().item()
            curve.append((round(middle, 1), right[here].mean().item()))
    curve = [(at, round(accuracy, 4)) for at, accuracy in curve]
    return {"level": round(torch.cat(within).mean().item(), 4), "curve": curve}


def answers(model: LanguageModel, task: Recall, live: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distance, place in the segment, and 1.0 where the answer is right, of all questions."""
    stream = task.stream(TEST_ROWS, TEST_SEED, live)
    memory, found = None, []
    for first in range(0, 2 * task.longest, SEGMENT):
        segment = stream.next(SEGMENT)
        out = model(segment.tokens, memory)
        memory = out.memory
        if first < task.longest:
            continue
        assert out.logits is not None
        asked = segment.distances > 0
        right = out.logits.argmax(-1) == segment.targets
        places = torch.arange(SEGMENT).expand_as(asked)
        found.append((segment.distances[asked], places[asked], right[asked].float()))
    distances, places, right = (torch.cat(part) for part in zip(*found, strict=True))
    return distances, places, right


# ----- Runs


def run_all(jobs: list[dict[str, Any]], path: Path, workers: int) -> None:
    """Do the jobs that are not in the file, and add each row to it."""
    done = [{key: row.get(key) for key in jobs[0]} for row in rows_in(path)] if jobs else []
    waiting = [job for job in jobs if job not in done]
    if not waiting:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for row in pool.imap_unordered(train, waiting):
            curve = " ".join(f"{accuracy:.2f}" for _, accuracy in row["curve"])
            print(
                f"{row['panel']:<6}{row['model']:<32}seed {row['seed']} rate {row['rate']:g} "
                f"{row['cpu_seconds']:6.0f} s  level {row['level']:.3f}  {curve}",
                flush=True,
            )
            # Read again: another call may have added its own. A row a line.
            rows = sorted(map(json.dumps, [*rows_in(path), row]))
            path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def trials(names: list[str]) -> list[dict[str, Any]]:
    return [
        {"panel": "rates", "model": name, "seed": 0, "rate": rate, "seconds": TRIAL}
        for name in names
        for rate in RATES
    ]


def best_rate(name: str, path: Path) -> float:
    """The trial with the best accuracy, all distances alike."""
    tried = [r for r in rows_in(path) if (r["panel"], r["model"]) == ("rates", name)]
    best = max(tried, key=lambda row: sum(accuracy for _, accuracy in row["curve"]))
    return float(best["rate"])


# ----- Pictures


def pictures(path: Path, models: Collection[str]) -> None:
    """Pictures of ``models`` beside the file; of panels that have many, the variants in their own."""
    for name, panel in PANELS.items():
        rows = [r for r in rows_in(path) if r["panel"] == name and r["model"] in models]
        if panel.live != _OVER_DISTANCE.live:
            _picture(path.with_name(f"recall-{name}.png"), name, rows)
            continue
        main = [r for r in rows if CONTESTANTS[r["model"]].main]
        varied = [r for r in rows if r["model"].startswith(("compressive", "fast-weights"))]
        _picture(path.with_name(f"recall-{name}.png"), name, main)
        _picture(path.with_name(f"recall-{name}-variants.png"), name, varied)


def _picture(image: Path, panel: str, rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    if not rows:
        return
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(figsize=(8, 4.4), dpi=160)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.92, bottom=0.12)
    draw(axes, panel, rows)
    figure.savefig(image)
    # A few dozen colours are enough, in a third of the bytes.
    Image.open(image).convert("RGB").quantize(64).save(image, optimize=True)
    pyplot.close(figure)
    print(f"written: {image}")


def draw(axes: Any, panel: str, rows: list[dict[str, Any]]) -> None:
    """Mean and range over seeds, the edges, and each line's name beside it."""
    by_distance = len(PANELS[panel].live) == 1
    lines: dict[str, tuple[list[float], list[float], str]] = {}
    for name in (name for name in CONTESTANTS if any(row["model"] == name for row in rows)):
        model, found = CONTESTANTS[name], [row for row in rows if row["model"] == name]
        at = [point[0] for point in found[0]["curve"]]
        scores = [[100 * point[1] for point in row["curve"]] for row in found]
        means = [sum(column) / len(column) for column in zip(*scores, strict=True)]
        low, high = ([f(column) for column in zip(*scores, strict=True)] for f in (min, max))
        axes.fill_between(at, low, high, color=model.colour, alpha=0.15, linewidth=0)
        axes.plot(
            at,
            means,
            linestyle=model.line,
            color=model.colour,
            linewidth=2.2 if model.main else 1.2,
        )
        label = model.label if panel != "level" else f"{model.label}: {cost(found)}"
        lines[label] = (at, means, model.colour)
    chance = 100 / PANELS[panel].task.n_values
    axes.axhline(chance, color="#999999", linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate(
        "guessing", (0.005, chance), (0, -9), xycoords=("axes fraction", "data"),
        textcoords="offset points", color="#666666", fontsize=8,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 104)
    axes.set_ylabel("answers right, %")
    ticks = [1, 4, 16, 64, 256, 1024, 4096] if by_distance else PANELS[panel].live
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens since the value was written" if by_distance else "keys in use")
    colours = {colour for _, _, colour in lines.values()}
    marks = [mark for mark in (EDGES if by_distance else FEATURES) if mark[2] in colours]
    for i, (text, at_edge, colour) in enumerate(marks):
        axes.axvline(at_edge, ymax=0.96, color=colour, linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        axes.annotate(
            text, (at_edge, 1), (0, 1 + 9 * (i % 2)), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", color=colour, fontsize=8,
        )  # fmt: skip
    put_names(axes, lines)


def _dense(at: list[float], means: list[float]) -> list[tuple[float, float]]:
    """Points along a line, close to one another."""
    points = []
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(at, means, strict=True)):
        points += [(x0 * (x1 / x0) ** (i / 8), y0 + (y1 - y0) * i / 8) for i in range(8)]
    return [*points, (at[-1], means[-1])]


Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""


def _inside(box: Box, points: Any) -> int:
    return int(((points > box[:2]) & (points < box[2:])).all(1).sum())


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def cost(rows: list[dict[str, Any]]) -> str:
    """CPU time of the runs, and that the level was missed where it was."""
    seconds = sum(row["cpu_seconds"] for row in rows) / len(rows)
    level = sum(row["level"] for row in rows) / len(rows)
    taken = f"{seconds / 60:.0f} min" if seconds > 99 else f"{seconds:.0f} s"
    reached = all(row["cpu_seconds"] < row["seconds"] for row in rows)
    return taken if reached else f"{taken} ({100 * level:.0f} %)"


def put_names(axes: Any, lines: dict[str, tuple[list[float], list[float], str]]) -> None:
    """Each name where it is near its own line and far from the others."""
    from matplotlib.patheffects import withStroke

    points = {
        name: axes.transData.transform(_dense(at, means)) for name, (at, means, _) in lines.items()
    }
    left, bottom = axes.transAxes.transform((0.01, 0.02))
    right, top = axes.transAxes.transform((0.99, 0.97))
    put: list[Box] = []
    unit = axes.figure.dpi / 72
    gap = 5 * unit
    for name, (_, _, colour) in lines.items():
        width, height = 5.9 * unit * len(name), 10 * unit
        best: tuple[float, Box] = (math.inf, (0.0, 0.0, 0.0, 0.0))
        for x, y in points[name][::3]:
            for dx, dy in itertools.product(
                (-width - gap, -width / 2, gap), (-height - gap, -height / 2, gap)
            ):
                box = (x + dx, y + dy, x + dx + width, y + dy + height)
                if box[0] < left or box[2] > right or box[1] < bottom or box[3] > top:
                    continue
                crossed = sum(_inside(box, points[other]) for other in lines)
                covered = sum(_overlap(box, other) for other in put)
                # Its own line may be near, others better not.
                around = (box[0] - gap, box[1] - gap, box[2] + gap, box[3] + gap)
                near = sum(_inside(around, points[other]) for other in lines if other != name)
                best = min(best, (10 * crossed + 50 * covered + near, box))
        put.append(best[1])
        text = axes.annotate(
            name, best[1][:2], xycoords="figure pixels", color=colour, fontsize=9, weight="bold"
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("panel", choices=[*PANELS, "pictures"])
    parser.add_argument("--models", nargs="+", choices=CONTESTANTS, metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=100, help="CPU time of a run")
    parser.add_argument("--limit", type=float, default=1800, help="the same in panel B")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--out", type=Path, default=Path("recall"), help="folder for results")
    options = parser.parse_args()
    path = options.out / "recall.json"
    if options.panel != "pictures":
        names = options.models or list(PANELS[options.panel].models)
        run_all(trials(names), path, options.workers)
        job: dict[str, Any] = {"panel": options.panel, "seconds": options.seconds}
        if options.panel == "level":
            job["seconds"] = options.limit
        rates = {name: best_rate(name, path) for name in names}
        jobs = [
            job | {"model": name, "seed": seed, "rate": rates[name]}
            for seed in options.seeds
            for name in names
        ]
        run_all(jobs, path, options.workers)
    pictures(path, options.models or CONTESTANTS)


if __name__ == "__main__":
    main()
