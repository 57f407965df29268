"""docs/findings.md: the papers' findings beside ours. Its numbers come from results files alone."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PAGE = DOCS / "findings.md"
PROSE = ROOT / "benchmarks" / "findings.toml"
"""Its text: claims, the papers' figures, how our measurements differ."""
STEPS = {"positions": 800, "feedback": 800, "compressed-memory": 1000, "compression": 600}
"""Updates of a training of each row: those with other numbers are trials, and not shown."""
PROGRAM_SECONDS = 600
USUAL_SPREAD = 0.02
"""Nats by which the presets' scores differ from seed to seed, at most (docs/memory-worth.md)."""
MISSING = "not measured yet"
YES, NO, UNDECIDED = "yes", "**no**", "undecided"

Table = list[list[str]]


@dataclass(frozen=True)
class Measured:
    """What we found."""

    summary: str
    agrees: str
    table: Table
    """The header first."""
    minutes: float | None
    """CPU time of all trainings (None: not recorded)."""


def runs_in(path: Path) -> list[dict[str, Any]]:
    """The trainings in a results file of findings.py."""
    return json.loads(path.read_text())["runs"] if path.is_file() else []


def found(row: str) -> dict[str, list[dict[str, Any]]]:
    """The row's trainings of full length by variant, by seed."""
    runs = [r for r in runs_in(RESULTS / "findings.json") if r["row"] == row]
    runs = [r for r in runs if r.get("steps") == STEPS.get(row) or row == "programs"]
    variants = dict.fromkeys(r["variant"] for r in runs)
    return {v: sorted((r for r in runs if r["variant"] == v), key=_seed) for v in variants}


def _seed(run: dict[str, Any]) -> int:
    return run["seed"]


def nats(runs: list[dict[str, Any]]) -> list[float]:
    return [run["nats"] for run in runs]


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.3f} (one seed)"
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


def lower(a: list[float], b: list[float], paired: bool = False) -> str:
    """Whether ``a`` is lower than ``b``: by more than two standard errors of the difference.

    Of one seed by more than three times the usual spread. ``paired``: both are of the same models,
    seed by seed.
    """
    gap = mean(b) - mean(a)
    if min(len(a), len(b)) == 1:
        return _verdict(gap, 3 * USUAL_SPREAD) + ", one seed"
    if paired:
        error = stdev(y - x for x, y in zip(a, b, strict=True)) / len(a) ** 0.5
    else:
        error = (stdev(a) ** 2 / len(a) + stdev(b) ** 2 / len(b)) ** 0.5
    return _verdict(gap, 2 * error)


def _verdict(gap: float, least: float) -> str:
    return UNDECIDED if abs(gap) <= least else YES if gap > 0 else NO


def minutes(groups: Iterable[list[dict[str, Any]]]) -> float:
    """CPU time of trainings and their scores."""
    runs = [run for group in groups for run in group]
    return sum(r["cpu_seconds"] + r.get("cpu_seconds_of_scores", 0) for r in runs) / 60


def all_of(row: str, *variants: str) -> dict[str, list[dict[str, Any]]] | None:
    """The row's trainings of these variants; None if one of them has none."""
    groups = found(row)
    return {v: groups[v] for v in variants} if all(v in groups for v in variants) else None


# ----- Dai et al. 2019

POSITIONS = ("recurrence, distances", "distances", "recurrence", "neither")
LONGER = 256
"""Slots at evaluation for which the claim is judged, chosen before measuring."""


def recurrence() -> Measured | None:
    runs = all_of("positions", *POSITIONS)
    if runs is None:
        return None
    scores = {name: nats(group) for name, group in runs.items()}
    both, distances, only, neither = scores.values()
    table = [
        ["nats per byte", "distances", "no distances"],
        ["recurrence, 64 slots", spread(both), spread(only)],
        ["no recurrence", spread(distances), spread(neither)],
    ]
    with_, without = lower(both, distances), lower(only, neither)
    agrees = with_ if with_ == without else f"{with_} (without distances: {without})"
    summary = f"{mean(both):.3f} with, {mean(distances):.3f} without"
    return Measured(summary, agrees, table, minutes(runs.values()))


def distances() -> Measured | None:
    measured = recurrence()
    if measured is None:
        return None
    runs = all_of("positions", *POSITIONS)
    assert runs is not None
    both, without, only, neither = map(nats, runs.values())
    carried, alone = lower(both, only), lower(without, neither)
    agrees = carried if carried == alone else f"{carried} (without recurrence: {alone})"
    summary = f"{mean(both):.3f} with, {mean(only):.3f} without"
    return Measured(summary, agrees, measured.table, measured.minutes)


def longer_memory() -> Measured | None:
    runs = all_of("positions", *POSITIONS)
    if runs is None:
        return None
    trained = {name: 64 if "recurrence" in name else 0 for name in POSITIONS}

    def at(name: str, slots: int) -> list[float]:
        if slots == trained[name]:
            return nats(runs[name])
        return [run["by_memory_length"].get(str(slots)) for run in runs[name]]

    lengths = [0, 64, 128, 256, 512]
    table = [["slots at evaluation", *map(str, lengths)]]
    for name in POSITIONS:
        cells = [at(name, slots) for slots in lengths]
        means = [f"{mean(c):.3f}" if None not in c else "" for c in cells]
        means[lengths.index(trained[name])] = f"*{means[lengths.index(trained[name])]}*"
        table.append([name, *means])
    own, longer = at(POSITIONS[0], 64), at(POSITIONS[0], LONGER)
    summary = f"{mean(own):.3f} with 64 slots, {mean(longer):.3f} with {LONGER}"
    agrees = lower(longer, own, paired=True)
    return Measured(summary, agrees, table, minutes(runs.values()))


PAPER_SLOWER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


def evaluation_speed() -> Measured | None:
    rows = json.loads((RESULTS / "sliding.json").read_text())["rows"]
    ratios = [row["ratio"] for row in rows]
    table = [["attention length", "times as fast", "the paper"]] + [
        [f"{r['attention_length']:,}", f"{r['ratio']:,.0f}", f"{PAPER_SLOWER[length]:,}"]
        for r in rows
        if (length := r["attention_length"]) in PAPER_SLOWER
    ]
    agrees = YES if ratios == sorted(ratios) and ratios[0] > 100 else NO
    return Measured(f"{ratios[0]:,.0f} to {ratios[-1]:,.0f} times", agrees, table, None)


# ----- Rae et al. 2019

PAPER_COMPRESSION = {
    "convolution, attention": "0.973",
    "dilated-convolution, attention": "0.977",
    "most-used": "0.980",
    "mean": "0.982",
    "convolution, auto-encoding": "0.984",
    "max": "0.986",
    "convolution, task": "0.996",
    "dilated-convolution, auto-encoding": "",
    "dilated-convolution, task": "",
}


def compression() -> Measured | None:
    runs = all_of("compression", *PAPER_COMPRESSION)
    if runs is None:
        return None
    scores = {name: nats(group) for name, group in runs.items()}
    table = [["function, loss", "nats per byte", "the paper, bits per character"]]
    table += [[name, spread(scores[name]), paper] for name, paper in PAPER_COMPRESSION.items()]
    first, *others = scores
    rival = min(others, key=lambda name: mean(scores[name]))
    summary = f"{first} {mean(scores[first]):.3f}; best other, {rival}, {mean(scores[rival]):.3f}"
    return Measured(summary, lower(scores[first], scores[rival]), table, minutes(runs.values()))


def compressed_memory() -> Measured | None:
    runs = all_of("compressed-memory", "compressive", "transformer-xl")
    if runs is None:
        return None
    ours, xl = (nats(group) for group in runs.values())
    without = [run["without_compressed"] for run in runs["compressive"]]
    sizes = {name: f"{group[0]['parameters']:,}" for name, group in runs.items()}
    table = [
        ["", "parameters", "nats per byte"],
        ["Compressive, 64 + 64 slots", sizes["compressive"], spread(ours)],
        ["the same, its compressed slots left out when read", "", spread(without)],
        ["Transformer-XL, 128 slots", sizes["transformer-xl"], spread(xl)],
    ]
    summary = f"Compressive {mean(ours):.3f}, Transformer-XL {mean(xl):.3f}"
    return Measured(summary, lower(ours, xl), table, minutes(runs.values()))


def attention_on_compressed() -> Measured | None:
    runs = all_of("compressed-memory", "compressive")
    if runs is None:
        return None
    shares = [[100 * share for share in run["attention"]] for run in runs["compressive"]]
    n = len(shares[0]) // 3
    means = [mean(share) for share in zip(*shares, strict=True)]
    table = [["share of attention, %", *(["oldest"] + [""] * (n - 2) + ["newest"])]]
    for i, kind in enumerate(("compressed slots", "memory", "segment")):
        table.append([kind, *(f"{share:.1f}" for share in means[i * n : (i + 1) * n])])
    # Of the newest compressed slots, and of the oldest slots of the memory: as many of each.
    compressed, memory = ([share[i] for share in shares] for i in (n - 1, n))
    summary = (
        f"{mean(compressed):.1f} % on the newest compressed slots, {mean(memory):.1f} % on the "
        f"oldest of the memory; {sum(means[:n]):.0f} % on all compressed slots"
    )
    return Measured(summary, lower(memory, compressed, paired=True), table, None)


# ----- Fan et al. 2020


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def programs(results: list[dict[str, Any]], known: float) -> Measured:
    """From results with ``model``, ``accuracy``, ``tokens``, ``parameters`` and ``seconds``."""
    table = [["", "parameters", "tokens read", "printed values right"]]
    table += [
        [r["model"], f"{r['parameters']:,}", f"{r['tokens']:,}", _percent(r["accuracy"])]
        for r in results
    ]
    table.append(["repeating the last known value", "", "", _percent(known)])
    share = {r["model"]: r["accuracy"] for r in results}
    gap = share["feedback"] - share["transformer-xl"]
    names = {"feedback": "Feedback", "transformer-xl": "Transformer-XL"}
    summary = ", ".join(f"{title} {_percent(share[name])}" for name, title in names.items())
    agrees = f"{_verdict(gap, 0.1)}, one seed"
    return Measured(summary, agrees, table, sum(r["seconds"] for r in results) / 60)


def three_variables() -> Measured | None:
    kept = json.loads((DOCS / "programs" / "programs-3.json").read_text())
    results = [
        {"model": r["model"], "parameters": r["parameters"]} | r["curve"][-1]
        for r in kept["results"]
    ]
    return programs(results, kept["last_value_known"])


def five_variables() -> Measured | None:
    groups = all_of("programs", "feedback", "transformer-xl")
    if groups is None:
        return None
    runs = [r for group in groups.values() for r in group if r["seconds"] == PROGRAM_SECONDS]
    results = [run | {"model": run["variant"], "seconds": run["cpu_seconds"]} for run in runs]
    return programs(results, runs[0]["last_value_known"]) if len(runs) == len(groups) else None


def projections() -> Measured | None:
    runs = all_of("feedback", "learned, shared", "learned, per layer")
    if runs is None:
        return None
    table = [["projections", "parameters", "nats per byte", "CPU seconds of training"]]
    for name, group in runs.items():
        seconds = mean(run["cpu_seconds"] for run in group)
        table.append([name, f"{group[0]['parameters']:,}", spread(nats(group)), f"{seconds:.0f}"])
    shared, apart = (nats(group) for group in runs.values())
    worse = lower(apart, shared)
    agrees = {YES: NO, NO: YES}.get(worse, worse)
    if agrees == UNDECIDED:
        agrees = "yes: no difference seen"
    summary = f"shared {mean(shared):.3f}, per layer {mean(apart):.3f}"
    return Measured(summary, agrees, table, minutes(runs.values()))


def memory_vector() -> Measured | None:
    runs = all_of("feedback", "learned, shared", "last, shared", "mean, shared")
    if runs is None:
        return None
    scores = {name.partition(",")[0]: nats(group) for name, group in runs.items()}
    table = [["memory vector", "nats per byte"]]
    table += [[name, spread(values)] for name, values in scores.items()]
    shares = zip(*(run["mixture"] for run in runs["learned, shared"]), strict=True)
    mixture = ", ".join(f"{mean(share):.2f}" for share in shares)
    table.append([f"learned weights: embedding, layer 1, layer 2: {mixture}", ""])
    learned, last, average = scores.values()
    rival = min(last, average, key=mean)
    summary = ", ".join(f"{name} {mean(values):.3f}" for name, values in scores.items())
    return Measured(summary, lower(learned, rival), table, minutes(runs.values()))


# ----- Schlag et al. 2021


def retrieval(setting: str) -> tuple[dict[str, dict[int, float]], float]:
    """The losses of examples/retrieval.py by model and number of keys; minutes."""
    rows = json.loads((DOCS / "retrieval" / f"retrieval-{setting}.json").read_text())["rows"]
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["model"], {})[row["keys"]] = row["loss"]
    return losses, sum(row["seconds"] for row in rows) / 60


def _losses(losses: dict[str, dict[int, float]]) -> Table:
    keys = list(next(iter(losses.values())))
    rows = [[name, *(f"{of[k]:.4f}" for k in keys)] for name, of in losses.items()]
    return [["keys", *map(str, keys)], *rows]


def capacity() -> Measured | None:
    losses, spent = retrieval("capacity")
    # In the order of their numbers of features: 32, 64, 128, 192.
    maps = ["sum elu", "sum dpfp-1", "sum dpfp-2", "sum dpfp-3"]
    most = max(losses[maps[0]])
    at_most = [losses[name][most] for name in maps]
    agrees = YES if at_most == sorted(at_most, reverse=True) else NO
    pairs = zip(maps, at_most, strict=True)
    summary = f"{most} keys: " + ", ".join(f"{n.partition(' ')[2]} {loss:.3f}" for n, loss in pairs)
    return Measured(summary, f"{agrees}, one seed", _losses(losses), spent)


def updates() -> Measured | None:
    losses, spent = retrieval("updates")
    most = max(losses["delta dpfp-1"])
    pairs = [(losses[f"delta dpfp-{nu}"][most], losses[f"sum dpfp-{nu}"][most]) for nu in (1, 2)]
    agrees = YES if all(delta < total / 5 for delta, total in pairs) else NO
    summary = f"{most} keys, dpfp 1: delta {pairs[0][0]:.3f}, sum {pairs[0][1]:.3f}"
    return Measured(summary, f"{agrees}, one seed", _losses(losses), spent)


def _fast_weights() -> dict[str, list[dict[str, Any]]]:
    rows = json.loads((RESULTS / "fast-weights-learning.json").read_text())["rows"]
    models = dict.fromkeys(row["model"] for row in rows)
    return {model: [row for row in rows if row["model"] == model] for model in models}


def _carried_table() -> Table:
    table = [["nats per byte", "each segment by itself", "carried throughout"]]
    for model, rows in _fast_weights().items():
        scores = ([row[kind] for row in rows] for kind in ("segments", "carried"))
        table.append([model, *map(spread, scores)])
    return table


def carried_rules() -> Measured | None:
    models = _fast_weights()
    delta, total = ([row["carried"] for row in models[rule]] for rule in ("delta", "sum"))
    summary = f"delta {mean(delta):.2f}, sum {mean(total):.2f}"
    return Measured(summary, lower(delta, total), _carried_table(), minutes(models.values()))


def carried_gain() -> Measured | None:
    rows = _fast_weights()["delta"]
    carried, apart = ([row[kind] for row in rows] for kind in ("carried", "segments"))
    summary = f"{mean(carried):.3f} carried, {mean(apart):.3f} segment by segment"
    return Measured(summary, lower(carried, apart, paired=True), _carried_table(), minutes([rows]))


# ----- The page

OURS: dict[str, Callable[[], Measured | None]] = {
    measure.__name__: measure
    for measure in (
        recurrence,
        distances,
        longer_memory,
        evaluation_speed,
        compressed_memory,
        attention_on_compressed,
        compression,
        three_variables,
        five_variables,
        projections,
        memory_vector,
        capacity,
        updates,
        carried_rules,
        carried_gain,
    )
}


def text() -> str:
    """The page."""
    prose = tomllib.loads(PROSE.read_text(encoding="utf-8"))
    overview = [["", "the paper", "here", "agrees", "CPU minutes"]]
    sections: list[str] = []
    for paper in prose["papers"]:
        overview.append([f"**{paper['name']}**", "", "", "", ""])
        sections += ["", f"## {paper['name']}", "", paper["source"]]
        above: Table | None = None
        for finding in paper["findings"]:
            measured = OURS[finding["ours"]]()
            figures = finding["paper"].replace("\n", " ")
            overview.append([finding["claim"], figures, *_cells(measured)])
            sections += _section(finding, measured, above)
            above = measured.table if measured else None
    lines = [prose["introduction"], _where(), "", *markdown(overview), *sections]
    return "\n".join(lines) + "\n"


def _where() -> str:
    runs = runs_in(RESULTS / "findings.json")
    if not runs:
        return "Of the trainings of `findings.py` none has been made yet."
    processors, pythons = (", ".join(sorted({r[k] for r in runs})) for k in ("processor", "python"))
    return f"The trainings of `findings.py`: one core of an {processors}, Python {pythons}."


def _cells(measured: Measured | None) -> list[str]:
    if measured is None:
        return [MISSING, "", ""]
    spent = "" if measured.minutes is None else f"{measured.minutes:.0f}"
    return [measured.summary, measured.agrees, spent]


def _section(finding: dict[str, str], measured: Measured | None, above: Table | None) -> list[str]:
    """A finding with its table, unless the one ``above`` is the same."""
    source = finding["source"]
    where = f"`{finding['command']}`: [{Path(source).name}]({source})"
    if measured is None:
        table = [MISSING.capitalize() + "."]
    else:
        table = ["The table above."] if measured.table == above else markdown(measured.table)
    return ["", f"### {finding['claim']}", "", where, "", finding["differs"], "", *table]


def markdown(table: Table) -> list[str]:
    """Lines of a table; its first row is the header."""
    header, *rows = table
    rule = ["---"] * len(header)
    return ["| " + " | ".join(row) + " |" for row in (header, rule, *rows)]


def write() -> None:
    """Write docs/findings.md."""
    PAGE.write_text(text(), encoding="utf-8")
