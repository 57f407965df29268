"""The recall experiment's pictures: accuracy against distance or keys, with the edges of theory."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from recall_models import (
    BLOCK,
    COMPRESSED,
    CONTESTANTS,
    EDGES,
    FEATURES,
    MEMORY,
    PANELS,
    RATE,
    SEGMENT,
    plots,
)


def pictures(rows: list[dict[str, Any]], folder: Path) -> None:
    """A picture of each panel in ``folder``; over distance also one of its variants."""
    for name, panel in PANELS.items():
        found = [row for row in rows if row["panel"] == name]
        if not panel.over_distance:
            _picture(folder / f"recall-{name}.png", name, found)
            continue
        main = [row for row in found if CONTESTANTS[row["model"]].main]
        families = ("compressive", "fast-weights", "gated-delta-net")
        varied = [row for row in found if row["model"].startswith(families)]
        _picture(folder / f"recall-{name}.png", name, main)
        if any(not CONTESTANTS[row["model"]].main for row in varied):
            _picture(folder / f"recall-{name}-variants.png", name, varied)


def _picture(image: Path, panel: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    # The names of architectures fit side by side; those of variants, or with times, do not.
    models = {row["model"] for row in rows}
    columns = (
        2 if panel in ("time", "today") and all(CONTESTANTS[name].main for name in models) else 1
    )
    figure, (axes,) = plots.panels(1, 3.0 + 0.22 * len(models) / columns)
    draw(axes, panel, rows)
    plots.name_lines(figure, axes, columns)
    plots.save(figure, image)


def draw(axes: Any, panel: str, rows: list[dict[str, Any]]) -> None:
    """Mean and range over seeds, and the edges; the legend begins with what is right most often."""
    by_distance = PANELS[panel].over_distance
    drawn = [name for name in CONTESTANTS if any(row["model"] == name for row in rows)]
    curves = {}
    for name in drawn:
        found = [row for row in rows if row["model"] == name]
        at = [point[0] for point in found[0]["curve"]]
        scores = [[100 * point[1] for point in row["curve"]] for row in found]
        curves[name] = found, at, [*zip(*scores, strict=True)]
    for name in sorted(drawn, key=lambda name: -fmean(map(fmean, curves[name][2]))):
        model = CONTESTANTS[name]
        found, at, columns = curves[name]
        low, high = ([f(column) for column in columns] for f in (min, max))
        axes.fill_between(at, low, high, color=model.style["color"], alpha=0.15, linewidth=0)
        label = model.label if panel != "level" else f"{model.label}: {cost(found)}"
        every = max(1, len(at) // 8)
        axes.plot(at, [*map(fmean, columns)], label=label, markevery=every, **model.style)
    soft = plots.colours.NEUTRAL["light"]["soft"]
    chance = 100 / PANELS[panel].task.n_values
    axes.axhline(chance, color=soft, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate(
        "guessing", (0.005, chance), (0, 3 if by_distance else -11), xycoords=("axes fraction", "data"),
        textcoords="offset points", color=soft,
    )  # fmt: skip
    axes.grid(visible=False)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-2 if chance < 10 else 0, 104)
    axes.set_ylabel("answers right, %")
    ticks = [1, 4, 16, 64, 256, 1024, 4096] if by_distance else PANELS[panel].live
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    sizes = (
        f"T = {SEGMENT} tokens in a segment; M = S = {MEMORY} slots;\nC = {COMPRESSED}, c = {RATE}"
    )
    if panel == "today":
        sizes = f"T = {SEGMENT} tokens in a segment; M = {MEMORY} slots;\nblocks of {BLOCK} tokens"
    axes.set_xlabel(
        f"tokens since the value was written\n{sizes}" if by_distance else "keys in use"
    )
    marks = [mark for mark in (EDGES if by_distance else FEATURES) if mark[2] in drawn]
    for i, (text, at_edge, name) in enumerate(marks):
        colour = CONTESTANTS[name].style["color"]
        axes.axvline(at_edge, ymax=0.96, color=colour, linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        axes.annotate(
            text, (at_edge, 1), (0, 1 + 12 * (i % 2)), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center",
        )  # fmt: skip


def cost(rows: list[dict[str, Any]]) -> str:
    """CPU time of the runs, and that the level was missed where it was."""
    seconds = sum(row["cpu_seconds"] for row in rows) / len(rows)
    level = sum(row["level"] for row in rows) / len(rows)
    taken = f"{seconds / 60:.0f} min" if seconds > 99 else f"{seconds:.0f} s"
    reached = all(row["cpu_seconds"] < row["seconds"] for row in rows)
    return taken if reached else f"{taken} ({100 * level:.0f} %)"
