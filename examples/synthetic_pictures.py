"""Pictures of the three tasks of short sequences: right answers of each model, seed by seed."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from recall_models import CONTESTANTS, plots

SEEDS_APART = 0.18
"""Height between the dots of two seeds, in rows."""


def pictures(rows: list[dict[str, Any]], folder: Path, pairs: int, words: int) -> None:
    """Draw in ``folder`` what was measured; ``rows`` are those of runs, without trials.

    Args:
        pairs: keys of a sequence of mqar, each with another value.
        words: values that there are.
    """
    many_keys = [row for row in rows if row["task"] == "mqar"]
    if many_keys:
        _dots(many_keys, folder / "mqar.png", pairs, words)
    states = {task: [row for row in rows if row["task"] == task] for task in ("parity", "s3")}
    if all(states.values()):
        _lines(states, folder / "states.png")


def _ordered(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each model, the best first."""
    names = {row["model"] for row in rows}
    found = {name: [row for row in rows if row["model"] == name] for name in names}
    best = sorted(names, key=lambda name: (-fmean(map(_mean, found[name])), name))
    return {name: found[name] for name in best}


def _mean(row: dict[str, Any]) -> float:
    return fmean(row["right"].values())


def _dots(rows: list[dict[str, Any]], image: Path, pairs: int, words: int) -> None:
    """A dot for each seed, a line of the picture for each model."""
    models = _ordered(rows)
    figure, (axes,) = plots.panels(1, 1.3 + 0.3 * len(models))
    for line, (name, found) in enumerate(models.items()):
        style = CONTESTANTS[name].style
        right = [100 * _mean(row) for row in found]
        at = [line + SEEDS_APART * (n - (len(right) - 1) / 2) for n in range(len(right))]
        axes.plot(right, at, style["marker"], color=style["color"], markersize=5.5, clip_on=False)
    soft = plots.colours.NEUTRAL["light"]["soft"]
    for chance, text in ((100 / words, "guess"), (100 / pairs, "any of its values")):
        axes.axvline(chance, color=soft, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
        axes.annotate(
            text, (chance, 1), (2, 2), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=soft, ha="right" if text == "guess" else "left",
        )  # fmt: skip
    axes.set_yticks(range(len(models)), [CONTESTANTS[name].label for name in models])
    axes.set_ylim(len(models) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("answers right, %, a mark for each seed")
    axes.grid(visible=False, axis="y")
    plots.save(figure, image)


def _lines(states: dict[str, list[dict[str, Any]]], image: Path) -> None:
    """A panel for each task: mean and range over seeds against the place in the sequence."""
    figure, panels = plots.panels(len(states), 2.7, sharex=True)
    order = _ordered([row for rows in states.values() for row in rows])
    titles = {"parity": ("parity of bits", 50), "s3": ("product of permutations of three", 100 / 6)}
    soft = plots.colours.NEUTRAL["light"]["soft"]
    for axes, (task, rows) in zip(panels, states.items(), strict=True):
        title, chance = titles[task]
        for name in order:
            found = [row for row in rows if row["model"] == name]
            if not found:
                continue
            style = CONTESTANTS[name].style
            at = [*map(int, found[0]["right"])]
            scores = [[100 * share for share in row["right"].values()] for row in found]
            columns = [*zip(*scores, strict=True)]
            low, high = ([f(column) for column in columns] for f in (min, max))
            axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
            axes.plot(at, [*map(fmean, columns)], label=CONTESTANTS[name].label, **style)
        axes.axhline(chance, color=soft, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
        axes.annotate(
            "guessing", (0.005, chance), (0, -12), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=soft,
        )  # fmt: skip
        axes.set_title(title, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 104)
        axes.set_ylabel("answers right, %")
        axes.set_xticks(at, [f"to {n}" for n in at])
        axes.minorticks_off()
    panels[-1].set_xlabel("tokens of the sequence; trained on 32")
    plots.name_lines(figure, panels[0])
    plots.save(figure, image)
