"""``measure.png``: a panel per kind of measurement, a line per run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memspan.errors import MemspanError
from memspan.files.pictures import label, png
from memspan.measurement.measure import Measurement
from memspan.measurement.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """Points with intervals."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """Lines over a logarithmic scale of tokens or slots."""

    title: str
    xlabel: str
    ylabel: str
    lines: list[Line] = field(default_factory=list)


def picture(measurements: list[Measurement], names: list[str]) -> bytes:
    """A PNG.

    Raises:
        MemspanError: there is nothing to draw; matplotlib is not installed, or fails.
    """
    panels = [panel for panel in _panels(measurements, names) if panel.lines]
    if not panels:
        raise MemspanError("there is nothing to draw")
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            for line in panel.lines:
                (drawn,) = axes.plot(line.x, line.y, marker=".", label=label(line.label))
                if line.low:
                    color = drawn.get_color()
                    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15)
            # Zero, too, has its place on the scale.
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")

    return png(draw, 6 * columns, 3.8 * rows, dpi=110)


def _panels(measurements: list[Measurement], names: list[str]) -> list[Panel]:
    more = "bits per byte"
    span = Panel("Loss against history", "tokens of history", f"{more} more than with the longest")
    repeats = Panel("Random strings that appear twice", "tokens apart", f"{more} saved")
    sizes: dict[str, Panel] = {}
    for name, m in zip(names, measurements, strict=True):
        if m.span is not None:
            found = [(p.history, p.difference) for p in m.span.points]
            span.lines.append(_line(name, found))
        if m.repeats is not None:
            repeats.lines.append(_line(name, [(p.distance, p.gain) for p in m.repeats.points]))
        for size in m.memory_lengths:
            words = size.option.replace("_", " ")
            panel = sizes.setdefault(
                size.option,
                Panel(f"Loss against {words}", "slots at evaluation", f"{more} more than trained"),
            )
            panel.lines.append(_line(name, [(p.slots, p.difference) for p in size.points]))
    inside = [
        panel for name, m in zip(names, measurements, strict=True) for panel in _inside(name, m)
    ]
    return [span, repeats, *sizes.values(), *inside]


def _inside(name: str, m: Measurement) -> Iterator[Panel]:
    """Panels of one run, a line per layer."""
    if m.attention is not None:
        layers = [layer.by_distance for layer in m.attention.layers]
        lines = _layers(m.attention.distances, layers)
        yield Panel(f"{name}: attention by distance", "tokens back, up to the next", "share", lines)
    if m.retention is not None:
        lines = _layers(m.retention.after, [layer.kept for layer in m.retention.layers])
        yield Panel(f"{name}: a written value", "further tokens", "share that is read back", lines)


def _layers(x: Sequence[int], values: Sequence[Sequence[float]]) -> list[Line]:
    return [Line(f"layer {n}", x, y) for n, y in enumerate(values, 1)]


def _line(name: str, points: Sequence[tuple[int, Estimate]]) -> Line:
    return Line(
        name,
        [x for x, _ in points],
        [e.value for _, e in points],
        [e.low for _, e in points],
        [e.high for _, e in points],
    )
