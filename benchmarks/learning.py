"""Architectures and variants side by side on Tiny Shakespeare: equal parameters, several seeds.

    python benchmarks/learning.py compressive     # and Transformer-XL: 1,500 steps each
    python benchmarks/learning.py feedback        # and others: 600 CPU seconds each; hours
    python benchmarks/learning.py fast-weights    # delta rule, sum rule, Transformer-XL: 1,500 steps
    python benchmarks/learning.py feedback --amount 60 --seeds 1 --json trial.json

All sides are trained by memspan's trainer on the first nine tenths of the text with the recipe of the
architecture's preset; sizes are chosen so that they have as many parameters.

`compressive`: scored in bits per byte on the last tenth, in one stream, memory carried.

`feedback`: the preset without its curriculum; `transformer-xl`, with twice as many layers and the width
that gives as many parameters; `curriculum`, the preset; `from transformer-xl`, a Feedback with
projections per layer that starts from a Transformer-XL of the same shape, whose training time counts.
Scored on the first 32,768 bytes of the last tenth in 16 streams.

`fast-weights`: scored in nats per byte on the last tenth twice, every segment by itself, and as one
stream with the memory carried from the first byte to the last.

Runs that are in results/COMPARISON-learning.json are not repeated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import plots
import timing
import trainings
from memspan.errors import MemspanError
from memspan.lab.runs import run as runs
from memspan.lab.runs.options import RunConfig, preset_file, read_config
from memspan.lab.training.warm_start import initialise_from
from memspan.models.transformer_xl.config import TransformerXLConfig
from shakespeare import add_text, parts
from shakespeare import preset as published
from sides import Side, n_parameters

Config = RunConfig[Any]
VALIDATION = 32_768
"""Bytes on which Feedback and its rivals are scored."""
FIRST = 0.3
"""Share of the time spent on the Transformer-XL that another side starts from."""
LOOKS = {"curriculum": ("feedback", 2), "from transformer-xl": ("feedback", 4)}


def transformer_xl(config: Config, **changes: Any) -> Config:
    """One with the sizes and the recipe of another model, but for some."""
    shared = ("n_layers", "d_model", "n_heads", "d_ff", "activation", "memory_length")
    sizes = {name: getattr(config.model, name, None) for name in shared} | changes
    model = TransformerXLConfig(**sizes).for_segments(config.train.segment_length)
    return dataclasses.replace(config, model=model, architecture="transformer-xl")


def with_learned_positions(config: Config, **sizes: Any) -> Config:
    return transformer_xl(config, positions="learned", max_distance=None, **sizes)


def as_large(configs: Iterable[Config], other: Config) -> Config:
    """The one whose number of parameters is closest to the other's."""
    wanted = n_parameters(other)
    return min(configs, key=lambda config: abs(n_parameters(config) - wanted))


def of_compressive() -> dict[str, Config]:
    preset = published("compressive")
    preset = dataclasses.replace(
        preset, model=preset.model.for_segments(preset.train.segment_length)
    )
    widths = range(64, 2049, 16)
    xl = as_large((with_learned_positions(preset, d_ff=width) for width in widths), preset)
    return {"compressive": preset, "transformer-xl": xl}


def of_feedback() -> dict[str, Config]:
    preset = read_config(preset_file("tiny-shakespeare-feedback"))
    loop = dataclasses.replace(preset.train, first_segment_length=None, curriculum_steps=0)
    plain = dataclasses.replace(preset, train=loop)
    layers = 2 * preset.model.n_layers
    ratio = preset.model.d_ff / preset.model.d_model
    rivals = (
        with_learned_positions(plain, n_layers=layers, d_model=width, d_ff=int(width * ratio))
        for width in range(32, 257, 4)
    )
    per_layer = dataclasses.replace(preset.model, projections="per-layer")
    return {
        "feedback": plain,
        "transformer-xl": as_large(rivals, preset),
        "curriculum": preset,
        "from transformer-xl": dataclasses.replace(plain, model=per_layer),
    }


def of_fast_weights() -> dict[str, Config]:
    preset = read_config(preset_file("tiny-shakespeare-fast-weights"))
    delta = preset.model
    total = dataclasses.replace(delta, rule="sum")
    attention = dataclasses.replace(total, normalisation="attention")
    # Fast Weights' wider feed-forward makes up for Transformer-XL's position projection.
    narrower = delta.d_ff - delta.d_model // 2
    xl = transformer_xl(preset, d_ff=narrower, memory_length=preset.train.segment_length)
    return {
        "delta": preset,
        "sum": dataclasses.replace(preset, model=total),
        "sum, attention": dataclasses.replace(preset, model=attention),
        "transformer-xl": xl,
    }


def for_steps(config: Config, text: Path, name: str, amount: float) -> dict[str, Any]:
    """Train for so many updates; the curve, and the final score in one stream."""
    side = Side(config, text)
    validation = parts(text)[1]
    curve = []
    seconds = 0.0
    while side.step < config.train.steps:
        every = max(1, config.train.steps // 10)
        seconds += side.train(min(every, config.train.steps - side.step))
        tokens = side.step * config.train.batch_size * config.train.segment_length
        bits = side.score(validation, streams=16) / math.log(2)
        curve.append({"tokens": tokens, "cpu_seconds": seconds, "bits": bits})
    bits = side.score(validation) / math.log(2)
    about = {"parameters": side.n_parameters, "cpu_seconds": seconds}
    return about | {"curve": curve, "bits_per_byte": bits}


def for_seconds(config: Config, text: Path, name: str, amount: float) -> dict[str, Any]:
    """Train for so much CPU time; the validation curve."""
    validation = parts(text)[1][:VALIDATION]
    curve: list[dict[str, float]] = []
    clock = 0.0
    tokens = 0

    def train(side: Side, until: float) -> None:
        nonlocal clock, tokens
        state = side.state
        loop = state.config.train
        before = 0
        begun = clock
        # The schedules count steps, so their number is estimated first.
        while clock < until:
            clock += side.train(1)
            step = side.step
            read = loop.tokens_read(side.step) * loop.batch_size
            tokens = tokens + read - before
            before = read
            if len(curve) < 16 * clock / amount or clock >= until:
                bits = side.score(validation, streams=16) / math.log(2)
                curve.append({"tokens": tokens, "cpu_seconds": clock, "bits": bits})
            if step == 50 or step % 200 == 0:
                total = max(step + 1, round(step * (until - begun) / (clock - begun)))
                loop = dataclasses.replace(loop, steps=total)
                state.config = dataclasses.replace(state.config, train=loop)

    trained = None
    if name == "from transformer-xl":
        first = with_learned_positions(config)
        source = Side(first, text)
        train(source, FIRST * amount)
        model = source.state.model
        tokenizer = source.prepared.tokenizer
        trained = runs.Run(Path(), first, tokenizer, model, step=source.step, corpus={})
    side = Side(config, text)
    if trained:
        initialise_from(side.state.model, side.prepared.tokenizer, trained)
    train(side, amount)
    about = {"parameters": side.n_parameters, "tokens": tokens}
    return about | {"curve": curve, "bits_per_byte": curve[-1]["bits"]}


def apart_and_carried(config: Config, text: Path, name: str, amount: float) -> dict[str, Any]:
    """Train for so many updates; the score segment by segment, and with the memory carried."""
    side = Side(config, text)
    validation = parts(text)[1]
    seconds = side.train(config.train.steps)
    found = {"parameters": side.n_parameters, "cpu_seconds": seconds}
    n_segments = len(validation) // config.train.segment_length
    for kind, streams in (("segments", n_segments), ("carried", 1)):
        try:
            found[kind] = side.score(validation, streams)
        except MemspanError as error:
            print(f"{kind}: {error}")
            found[kind] = float("inf")
    return found


@dataclasses.dataclass(frozen=True)
class Comparison:
    sides: Callable[[], dict[str, Config]]
    run: Callable[[Config, Path, str, float], dict[str, Any]]
    unit: str
    amount: int
    measured: tuple[str, ...] = ("bits_per_byte",)


COMPARISONS = {
    "compressive": Comparison(of_compressive, for_steps, "steps", 1500),
    "feedback": Comparison(of_feedback, for_seconds, "seconds", 600),
    "fast-weights": Comparison(
        of_fast_weights, apart_and_carried, "steps", 1500, ("segments", "carried")
    ),
}


def run(job: dict[str, Any], comparison: str, text: Path) -> dict[str, Any]:
    """One training and its scores."""
    chosen = COMPARISONS[comparison]
    config = chosen.sides()[job["model"]]
    amount = job[chosen.unit]
    steps = amount if chosen.unit == "steps" else config.train.steps
    loop = dataclasses.replace(config.train, steps=steps, seed=job["seed"])
    return chosen.run(dataclasses.replace(config, train=loop), text, job["model"], amount)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--amount", type=int, help="steps, or CPU seconds, of a run")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--json", type=Path, help="default: results/COMPARISON-learning.json")
    trainings.add_options(parser)
    add_text(parser)
    options = parser.parse_args()
    chosen = COMPARISONS[options.comparison]
    path = options.json or timing.RESULTS / f"{options.comparison}-learning.json"
    amount = options.amount or chosen.amount
    jobs = [
        {"model": name, "seed": seed, chosen.unit: amount}
        for seed in options.seeds
        for name in options.models or chosen.sides()
    ]
    make_one = partial(run, comparison=options.comparison, text=options.text)
    rows = trainings.make(jobs, make_one, path, options.workers)
    shown = (*chosen.measured, *(name for name in ("cpu_seconds", "tokens") if name in rows[0]))
    print(trainings.table(rows, ("model", chosen.unit, "parameters"), shown))
    plot(rows, path.with_suffix(".png"))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation against tokens and time, a line for each run; of runs without curves their scores."""
    if "curve" not in rows[0]:
        return plot_points(rows, path)
    figure, panels = plots.panels(2, sharey=True)
    for axes, key, unit in zip(panels, ("tokens", "cpu_seconds"), (1e6, 1), strict=True):
        for name in dict.fromkeys(row["model"] for row in rows):
            style = plots.look(*LOOKS.get(name, (name,))) | {"linewidth": 1.2, "markevery": 3}
            for n, row in enumerate(r for r in rows if r["model"] == name):
                at = [point[key] / unit for point in row["curve"]]
                bits = [point["bits"] for point in row["curve"]]
                axes.plot(at, bits, label=name if n == 0 else None, **style)
        axes.set(ylabel="validation, bits per byte", ylim=(None, 4))
    panels[0].set(xlabel="millions of tokens read")
    panels[1].set(xlabel="CPU seconds of training")
    plots.name_lines(figure, panels[0])
    plots.save(figure, path)


def plot_points(rows: list[dict[str, Any]], path: Path) -> None:
    """A point for each seed, without and with the memory carried."""
    figure, (axes,) = plots.panels(1, 3.2)
    names = list(dict.fromkeys(row["model"] for row in rows))
    kinds = {"segments": "every segment by itself", "carried": "memory carried throughout"}
    looks = {"segments": plots.look("transformer"), "carried": plots.look("fast-weights")}
    for i, (kind, label) in enumerate(kinds.items()):
        at = [names.index(row["model"]) + 0.2 * i - 0.1 for row in rows]
        style = looks[kind] | {"linestyle": ""}
        axes.plot(at, [row[kind] for row in rows], label=label, **style)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.set(ylabel="validation loss, nats per byte")
    plots.name_lines(figure, axes, columns=1)
    plots.save(figure, path)


if __name__ == "__main__":
    main()
