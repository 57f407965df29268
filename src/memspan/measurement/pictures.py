"""``measure.png``: a panel per kind of measurement, a line per run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memspan.errors import MemspanError
from memspan.files.pictures import label, png
from memspan.measurement.measure import Measurement
from memspan.measurement.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Line = tuple[str, Sequence[float], Sequence[float | Estimate]]
"""A label, x and y."""
Panels = dict[tuple[str, str, str], list[Line]]
"""Lines over a logarithmic scale of tokens or slots, by the panel's title and the axes' labels."""


def picture(measurements: list[Measurement], names: list[str]) -> bytes:
    """A PNG, if there is anything to draw and matplotlib to draw it."""
    panels = _panels(measurements, names)
    if not panels:
        raise MemspanError("there is nothing to draw")
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        for number, ((title, xlabel, ylabel), lines) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, number)
            for text, x, y in lines:
                middle = [v.value if isinstance(v, Estimate) else v for v in y]
                (drawn,) = axes.plot(x, middle, marker=".", label=label(text))
                if bounds := [(v.low, v.high) for v in y if isinstance(v, Estimate)]:
                    low, high = zip(*bounds, strict=True)
                    axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15)
            # The scale has a place for zero.
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")

    return png(draw, 6 * columns, 3.8 * rows, dpi=110)


def _panels(measurements: list[Measurement], names: list[str]) -> Panels:
    panels: Panels = {}

    def add(title: str, xlabel: str, ylabel: str, *lines: Line) -> None:
        panels.setdefault((title, xlabel, ylabel), []).extend(lines)

    more = "bits per byte"
    for name, m in zip(names, measurements, strict=True):
        if m.span is not None:
            x, y = zip(*((p.history, p.difference) for p in m.span.points), strict=True)
            ylabel = f"{more} more than with the longest"
            add("Loss against history", "tokens of history", ylabel, (name, x, y))
        if m.repeats is not None:
            x, y = zip(*((p.distance, p.gain) for p in m.repeats.points), strict=True)
            title = "Random strings that appear twice"
            add(title, "tokens apart", f"{more} saved", (name, x, y))
        for size in m.memory_lengths:
            x, y = zip(*((p.slots, p.difference) for p in size.points), strict=True)
            title = f"Loss against {size.option.replace('_', ' ')}"
            add(title, "slots at evaluation", f"{more} more than trained", (name, x, y))
        if m.attention is not None:
            x, layers = m.attention.distances, [each.by_distance for each in m.attention.layers]
            title = f"{name}: attention by distance"
            add(title, "tokens back, up to the next", "share", *_layers(x, layers))
        if m.retention is not None:
            x, layers = m.retention.after, [each.kept for each in m.retention.layers]
            title = f"{name}: a written value"
            add(title, "further tokens", "share that is read back", *_layers(x, layers))
    return panels


def _layers(x: Sequence[int], values: Sequence[Sequence[float]]) -> list[Line]:
    return [(f"layer {n}", x, y) for n, y in enumerate(values, 1)]
