"""The report on measured runs: tables, ``measure.json`` and ``measure.png``."""

from __future__ import annotations

import json
import logging
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from memspan.errors import MemspanError, counted
from memspan.files.disk import write_atomically
from memspan.lab.measurement.effective_context import EffectiveContext, effective_context
from memspan.lab.measurement.measure import Measurement
from memspan.lab.measurement.memory_length import MemoryLength
from memspan.lab.measurement.span import TOLERANCE, Span
from memspan.lab.measurement.statistics import Estimate
from memspan.lab.pictures import label, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ENOUGH_BLOCKS = 50
"""The fewest blocks whose intervals a report does not call rough."""
Line = tuple[str, Sequence[float], Sequence[float | Estimate]]
"""A label, x and y."""


@dataclass(frozen=True)
class Table:
    """Numbers under a title, and the lines drawn from them."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str
    panel: tuple[str, str, str] = ("", "", "")
    """Title and axes' labels of a panel of the picture, which several runs may share."""
    lines: Sequence[Line] = ()
    """Lines of that panel, over a logarithmic scale of tokens or slots."""
    result: tuple[str, float] | None = None
    """A label and the place on that scale of a vertical line, in the colour of the line before."""


class Report:
    """A report on measurements that are shown side by side."""

    def __init__(self, measurements: list[Measurement]) -> None:
        self.measurements = measurements
        self.names = _names(measurements)
        """Short, distinct names."""
        self.effective_context: list[EffectiveContext] = []
        self.notes = [
            f"{name} does worse with a long history: its loss is lowest with "
            f"{counted(best.history, 'token')}, so measure its span with --longest {best.history}"
            for name, m in zip(self.names, measurements, strict=True)
            if m.span is not None
            and (best := min(m.span.points, key=lambda point: point.bits_per_byte))
            and best.difference.high < -TOLERANCE
        ]
        self.notes += [
            f"{name} was measured on {m.span.blocks} blocks of text, and intervals from fewer than "
            f"{ENOUGH_BLOCKS} are rough: give a longer text (--corpus) or more time (--budget)"
            for name, m in zip(self.names, measurements, strict=True)
            if m.span is not None and m.span.blocks < ENOUGH_BLOCKS
        ]
        if len(measurements) > 1:
            self._compare()

    def _compare(self) -> None:
        first = self.measurements[0]
        spans = {m.run: m.span for m in self.measurements if m.span is not None}
        if any(m.vocabulary != first.vocabulary for m in self.measurements):
            self.notes.append(
                "the runs have different tokenisers: their bits per byte can be compared, their "
                "distances, which are in tokens, cannot"
            )
        elif any((m.corpus, m.split) != (first.corpus, first.split) for m in self.measurements):
            self.notes.append(
                "the runs were measured on different texts, so their losses cannot be compared: "
                "give one with --corpus"
            )
        elif len(spans) == len(self.measurements):
            self.effective_context = effective_context(spans)
            reached = sorted({span.longest for span in spans.values()})
            if len(reached) > 1:
                self.notes.append(
                    f"the runs' longest histories differ ({', '.join(f'{n:,}' for n in reached)} "
                    "tokens), so their spans cannot be compared: raise --budget, or lower --longest"
                )
        if not self.effective_context:
            self.notes.append(
                "no relative effective context length: it needs the same tokens of the same text "
                "for all runs"
            )

    def as_dict(self) -> dict[str, object]:
        """All numbers, plain JSON values."""
        return {
            "runs": [m.as_dict() for m in self.measurements],
            "effective_context": [asdict(row) for row in self.effective_context],
            "notes": self.notes,
        }

    def tables(self) -> list[Table]:
        """Everything that was measured."""
        found = [self._overview()]
        for name, m in zip(self.names, self.measurements, strict=True):
            found += [*_losses(name, m), *_inside(name, m)]
        if self.effective_context:
            shares = self.effective_context[0].tokens
            rows = [
                (name, *(_at_least(row.tokens[r], row.tokens[r] == row.longest) for r in shares))
                for name, row in zip(self.names, self.effective_context, strict=True)
            ]
            found.append(
                Table(
                    "Relative effective context length (Dai et al. 2019), tokens",
                    ("run", *(f"r = {r:g}" for r in shares)),
                    rows,
                    "Context that still improves on the best short-context run by 1 %; r: only this "
                    "share of the tokens, the hardest.",
                )
            )
        return found

    def _overview(self) -> Table:
        rows = []
        for name, m in zip(self.names, self.measurements, strict=True):
            span = "not measured"
            blocks = ""
            if m.span is not None:
                blocks = f"{m.span.blocks:,}"
                span = "none: worst with the longest"
                if m.span.tokens is not None:
                    span = _at_least(m.span.tokens, m.span.beyond)
                    span += f" [{m.span.low:,}, {m.span.high:,}]"
            of_model = (m.architecture, f"{m.parameters:,}", m.tokenizer)
            text = f"{m.corpus}, {m.split}"
            state = f"{m.state_bytes:,}"
            rows.append((name, *of_model, text, span, blocks, state, f"{m.seconds:.0f}"))
        return Table(
            "Span",
            (
                "run", "architecture", "parameters", "tokens", "text", "span in tokens", "blocks",
                "bytes of state", "CPU s",
            ),
            rows,
            f"The smallest history whose loss is within {TOLERANCE} bits per byte of the longest "
            "history's, with a 95 % interval from that many blocks of neighbouring tokens. State: "
            "what one stream carries.",
        )  # fmt: skip


def _at_least(tokens: int, beyond: bool) -> str:
    """Format a length that may be longer, since nothing longer was measured."""
    return f"{'at least ' if beyond else ''}{tokens:,}"


def _losses(name: str, m: Measurement) -> Iterator[Table]:
    """The effect of history, memory and repetition on one run's loss."""
    if m.span is not None:
        yield Table(
            f"{name}: loss against history, from an empty memory",
            ("tokens of history", "bits per byte", "more than with the longest"),
            [
                (f"{p.history:,}", f"{p.bits_per_byte:.4f}", str(p.difference))
                for p in m.span.points
            ],
            _scored(m.span)
            + (m.window is not None) * f" With more history, the last {m.window} are read anew.",
            (
                "Loss against history",
                "tokens of history",
                "bits per byte more than with the longest",
            ),
            [(name, [p.history for p in m.span.points], [p.difference for p in m.span.points])],
            None
            if m.span.tokens is None
            else (f"span: {_at_least(m.span.tokens, m.span.beyond)}", m.span.tokens),
        )
    for sizes in m.memory_lengths:
        notes = {p.slots: " (training)" * (p.slots == sizes.trained) for p in sizes.points}
        option = sizes.option.replace("_", " ")
        yield Table(
            f"{name}: loss against {option} at evaluation",
            ("slots", "bits per byte", "more than in training"),
            [
                (
                    f"{p.slots:,}{notes[p.slots]}{'' if p.full else ', not full'}",
                    f"{p.bits_per_byte:.4f}",
                    str(p.difference),
                )
                for p in sizes.points
            ],
            _scored(sizes),
            (f"Loss against {option}", "slots at evaluation", "bits per byte more than trained"),
            [(name, [p.slots for p in sizes.points], [p.difference for p in sizes.points])],
        )
    if m.repeats is not None:
        yield Table(
            f"{name}: random strings that appear twice",
            ("tokens apart", "bits per byte", "without the first", "gain"),
            [
                (f"{p.distance:,}", f"{p.repeated:.3f}", f"{p.control:.3f}", str(p.gain))
                for p in m.repeats.points
            ],
            f"{counted(m.repeats.strings, 'string')} in every row.",
            ("Random strings that appear twice", "tokens apart", "bits per byte saved"),
            [(name, [p.distance for p in m.repeats.points], [p.gain for p in m.repeats.points])],
        )


def _inside(name: str, m: Measurement) -> Iterator[Table]:
    """Tables of the model's attention, and of the retention of its matrices."""
    if m.attention is not None:
        kinds = list(m.attention.layers[0].by_kind)
        yield Table(
            f"{name}: attention, % by distance in tokens and by part ({', '.join(kinds)})",
            ("layer", *(f"{d:,}+" for d in m.attention.distances), *kinds, "mean"),
            [
                (
                    str(n),
                    *map(_percent, layer.by_distance),
                    *(_percent(layer.by_kind[kind]) for kind in kinds),
                    f"{layer.mean_distance:.1f}",
                )
                for n, layer in enumerate(m.attention.layers, 1)
            ],
            f"Over {counted(m.attention.tokens, 'token')}; mean: the mean distance in tokens.",
            (f"{name}: attention by distance", "tokens back, up to the next", "share"),
            _by_layer(m.attention.distances, [each.by_distance for each in m.attention.layers]),
        )
    if m.retention is not None:
        rank = f"effective rank of {m.retention.full_rank}"
        yield Table(
            f"{name}: % of a written value that its key still reads after n further tokens",
            ("layer", *(f"{n:,}" for n in m.retention.after), rank),
            [
                (str(n), *map(_percent, layer.kept), f"{layer.effective_rank:.1f}")
                for n, layer in enumerate(m.retention.layers, 1)
            ],
            f"Over {counted(m.retention.values, 'value')} per layer and head. The rank says how full "
            "the matrices are.",
            (f"{name}: a written value", "further tokens", "share that is read back"),
            _by_layer(m.retention.after, [each.kept for each in m.retention.layers]),
        )


def _by_layer(x: Sequence[int], values: Sequence[Sequence[float]]) -> list[Line]:
    return [(f"layer {n}", x, y) for n, y in enumerate(values, 1)]


def _scored(found: Span | MemoryLength) -> str:
    targets = counted(found.targets, "token")
    blocks = counted(found.blocks, "block")
    return f"The same {targets}, in {blocks}, in every row."


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def answers(report: Report) -> Iterator[str]:
    """Say for each run, in a sentence, how much history it uses."""
    for name, m in zip(report.names, report.measurements, strict=True):
        if m.span is None:
            continue
        unit = "byte" if m.tokenizer == "bytes" else "token"
        if m.span.tokens is None:
            yield f"{name} uses no history: it predicts worst with the longest."
            continue
        least = "at least " if m.span.beyond else ""
        yield (
            f"{name} uses {least}{counted(m.span.tokens, unit)} of history (95 % interval: "
            f"{m.span.low:,} to {m.span.high:,})."
        )


def printed(report: Report) -> str:
    """The answers, then the tables as text; a table of one run has a line for each of its columns."""
    parts = ["\n".join(map(_wrapped, answers(report)))] if any(answers(report)) else []
    for table in report.tables():
        if table.title == "Span" and len(table.rows) == 1:
            (row,) = table.rows
            width = max(map(len, table.columns))
            lines = [
                f"  {column.ljust(width)}  {cell}".rstrip()
                for column, cell in zip(table.columns, row, strict=True)
            ]
            parts.append("\n".join([table.title, *lines, _wrapped(table.note)]))
            continue
        cells = [table.columns, *table.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
        lines = [
            "  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        parts.append("\n".join([table.title, *lines, _wrapped(table.note)]))
    return "\n\n".join([*parts, *map(_wrapped, report.notes)])


def _wrapped(text: str) -> str:
    """Break a sentence between words where the terminal ends."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def written(report: Report, folder: Path) -> list[Path]:
    """Write the report's files into ``folder``, the numbers first, and return their paths."""
    found = json.dumps(report.as_dict(), indent=2, allow_nan=False)
    files = {folder / "measure.json": f"{found}\n".encode()}
    try:
        files[folder / "measure.png"] = picture(report)
    except MemspanError as error:
        logging.getLogger("memspan").warning(f"no picture: {error}")
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def picture(report: Report) -> bytes:
    """A PNG, if there is anything to draw and matplotlib to draw it."""
    panels: dict[tuple[str, str, str], list[Table]] = {}
    for table in report.tables():
        if table.lines:
            panels.setdefault(table.panel, []).append(table)
    if not panels:
        raise MemspanError("there is nothing to draw")
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        for number, ((title, xlabel, ylabel), tables) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, number)
            for table in tables:
                _draw(axes, table)
            # The scale has a place for zero, and for what is negative, which a length never is.
            axes.set_xscale("symlog", base=2, linthresh=1)
            first = min(x for table in tables for _, at, _ in table.lines for x in at)
            axes.set_xlim(left=first / 1.2 or -0.2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
            axes.legend(fontsize="small")

    return png(draw, 6 * columns, 3.8 * rows, dpi=110)


def _draw(axes: Axes, table: Table) -> None:
    """Draw a table's lines, their intervals and its result."""
    for text, x, y in table.lines:
        middle = [v.value if isinstance(v, Estimate) else v for v in y]
        (drawn,) = axes.plot(*with_gaps(x, middle), marker=".", label=label(text))
        if bounds := [(v.low, v.high) for v in y if isinstance(v, Estimate)]:
            low, high = zip(*bounds, strict=True)
            at, lows = with_gaps(x, low)
            _, highs = with_gaps(x, high)
            axes.fill_between(at, lows, highs, color=drawn.get_color(), alpha=0.15)
    if table.result is not None:
        text, place = table.result
        axes.axvline(place, color=drawn.get_color(), linestyle="--", linewidth=1, label=text)


def with_gaps(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """A line with a gap where more than an octave was not measured, as from no memory to 16 slots."""
    places = list(x[:1])
    values = list(y[:1])
    for (before, after), value in zip(pairwise(x), y[1:], strict=True):
        if after > 2 * max(before, 0.5):
            places.append(after)
            values.append(math.nan)
        places.append(after)
        values.append(value)
    return places, values


def _names(measurements: list[Measurement]) -> list[str]:
    """The last parts of the runs' paths, as many as make them distinct."""
    paths = [Path(m.run).resolve().parts for m in measurements]
    for n in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-n:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [m.run for m in measurements]
