"""The recall experiment's pictures: accuracy against distance or keys, with the edges of theory."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from recall_models import CONTESTANTS, EDGES, FEATURES, PANELS

Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""


def pictures(rows: list[dict[str, Any]], folder: Path) -> None:
    """A picture of each panel in ``folder``; of panels over distance, one of the variants as well."""
    for name, panel in PANELS.items():
        found = [row for row in rows if row["panel"] == name]
        if not panel.over_distance:
            _picture(folder / f"recall-{name}.png", name, found)
            continue
        main = [row for row in found if CONTESTANTS[row["model"]].main]
        families = ("compressive", "fast-weights", "gated-delta-net")
        varied = [row for row in found if row["model"].startswith(families)]
        _picture(folder / f"recall-{name}.png", name, main)
        _picture(folder / f"recall-{name}-variants.png", name, varied)


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
    by_distance = PANELS[panel].over_distance
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


def _dense(at: list[float], means: list[float]) -> list[tuple[float, float]]:
    """Points along a line, close to one another."""
    points = []
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(at, means, strict=True)):
        points += [(x0 * (x1 / x0) ** (i / 8), y0 + (y1 - y0) * i / 8) for i in range(8)]
    return [*points, (at[-1], means[-1])]


def _inside(box: Box, points: Any) -> int:
    return int(((points > box[:2]) & (points < box[2:])).all(1).sum())


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
