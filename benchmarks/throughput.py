"""Speed and memory of memspan against its peers, on one CPU thread.

Work: train, a segment forward, backward and an AdamW step; attention, one attention layer forward and
backward by itself; evaluate, the losses of a segment without gradients; generate, one token. All with
full memory, carried from call to call, where the peer has one. Ratios are the peer's CPU time over ours
within one round, sides taking turns; shown are the median and the lowest and highest round. Where a
peer computes the same function, its weights are copied into our model first and logits, losses and a
gradient are compared in float32: on a difference nothing is measured. Peak memory is what training
takes beyond the model itself, each side in a process of its own.

Two views of the same rounds. The same setting: every library with one precision of matrix products, for
each of --precision. As it comes: every library with its own defaults, memspan's being `auto`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from memspan.precision.products import automatic
from peers.side import VOCAB_SIZE, Side, Size
from precisions import PRECISIONS, autocast, comparisons, processor, products_in
from products import LARGE_OPERATIONS, LARGE_PRODUCT, large_product, operations
from timing import interleaved, ratio, write

Row = dict[str, Any]
Key = tuple[str, str]
"""A side, or the large product, and its precision."""

S = Size(128, 4, 6, 512, segment_length=64, memory_length=64, batch_size=16)
M = Size(256, 8, 6, 1024, segment_length=128, memory_length=128, batch_size=16)
L = Size(256, 8, 2, 1024, segment_length=256, memory_length=512, batch_size=4)
PAPER = Size(512, 8, 12, 2048, segment_length=512, memory_length=512, batch_size=1)


def feedback_size(length: int) -> Size:
    return Size(128, 4, 4, 512, segment_length=length, memory_length=2 * length, batch_size=16)


def fast_weights_size(length: int) -> Size:
    return Size(
        128,
        4,
        1,
        512,
        segment_length=length,
        memory_length=0,
        batch_size=16,
        generate_batch=16,
        works=("train", "attention") + (("generate",) if length == 64 else ()),
        alone=length > 1024,
    )


# Architecture: its sizes.
SIZES: dict[str, dict[str, Size]] = {
    "transformer-xl": {
        "S": S,
        "M": M,
        "L": L,
        "L-batch8": replace(L, generate_batch=8, works=("generate",)),
        "S-batch16": replace(S, generate_batch=16, works=("generate",)),
        "M-batch16": replace(M, generate_batch=16, works=("generate",)),
        "L-batch16": replace(L, generate_batch=16, works=("generate",)),
        "paper": PAPER,
    },
    "compressive": {
        "S": replace(S, compressed_length=S.memory_length),
        "M": replace(M, compressed_length=M.memory_length),
        "S-no-loss": replace(
            S, compressed_length=S.memory_length, auxiliary_loss=False, works=("train",)
        ),
        "M-no-loss": replace(
            M, compressed_length=M.memory_length, auxiliary_loss=False, works=("train",)
        ),
    },
    # Each segment starts empty, as with the peer; generation goes on from one to twice its length.
    "feedback": {
        **{f"T{n}": feedback_size(n) for n in (64, 128, 256)},
        "T64-dropout": replace(feedback_size(64), dropout=0.1, works=("train",)),
    },
    "fast-weights": {
        **{f"T{n}": fast_weights_size(n) for n in (64, 256, 1024, 4096, 16384)},
        "T64-batch1": replace(fast_weights_size(64), generate_batch=1, works=("generate",)),
    },
}
# Architecture: our side, then its peers, each "module:class". Imported when used.
ARCHITECTURES = {
    "transformer-xl": {
        "memspan": "peers.memspan_xl:MemspanXL",
        "labml": "peers.labml_xl:LabmlXL",
        "labml-short-table": "peers.labml_xl:LabmlShortTable",
        "x-transformers": "peers.x_transformers_xl:XTransformersXL",
        "plain-gpt": "peers.plain_gpt:PlainGPT",
    },
    "compressive": {
        "memspan": "peers.memspan_compressive:MemspanCompressive",
        "labml": "peers.labml_compressive:LabmlCompressive",
    },
    "feedback": {
        "memspan": "peers.memspan_feedback:MemspanFeedback",
        "labml": "peers.labml_feedback:LabmlFeedback",
    },
    "fast-weights": {
        "memspan": "peers.memspan_fw:MemspanFW",
        "labml": "peers.labml_fw:LabmlFW",
        "labml-repaired": "peers.labml_fw:LabmlRepairedFW",
    },
}
READING = ("evaluate", "generate")
WORKS = ("train", "attention", *READING)
TOLERANCE = 1e-4


def side_class(architecture: str, name: str) -> type[Side]:
    module, kind = ARCHITECTURES[architecture][name].split(":")
    found: type[Side] = getattr(import_module(module), kind)
    return found


def own_precision(name: str, work: str) -> str:
    """A library's precision without options: torch's default, and memspan's ``auto`` on this CPU, where
    only training may be in bfloat16."""
    if name != "memspan":
        return "float32"
    auto = automatic(torch.device("cpu"))
    if auto.products == "bfloat16" and work not in READING:
        return "bfloat16"
    return {"highest": "float32", "medium": "medium"}[auto.matmul]


@contextlib.contextmanager
def at(precision: str, work: str) -> Iterator[None]:
    """Around many calls of one work. Training enters autocast in each, since it caches weights."""
    with products_in(precision), autocast(precision if work in READING else "float32"):
        yield


def segments(size: Size, batch: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Segments of one random text, repeated: inputs and targets ``[B, T]``."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB_SIZE, (batch, 16 * length + 1), generator=generator)
    at = -1

    def following() -> tuple[Tensor, Tensor]:
        nonlocal at
        at = (at + 1) % 16
        return (
            text[:, at * length : (at + 1) * length],
            text[:, at * length + 1 : (at + 1) * length + 1],
        )

    return following


def check(ours: Side, theirs: Side, size: Size) -> float:
    """Copy their weights into ours, compare, and return the largest difference.

    Compared over three segments, the first with an empty memory: losses and the embedding's gradient
    in training; logits; then the logits of three single tokens.
    """
    theirs.weights_to(ours.model)
    worst = 0.0
    results: list[list[Tensor]] = []
    x = torch.randn(2, size.segment_length, size.d_model, requires_grad=True)
    for side in (ours, theirs):
        result: list[Tensor] = []
        side.model.train()
        side.forget(2)
        text = segments(size, 2, size.segment_length)
        for _ in range(3):
            loss = side.loss(*text())
            (gradient,) = torch.autograd.grad(loss, [side.embedding()])
            result += [loss.detach(), gradient]
        side.model.eval()
        side.forget(2)
        text = segments(size, 2, size.segment_length)
        for _ in range(3):
            result.append(side.read(text()[0]))
        tokens, _ = text()
        result += [side.read(tokens[:, i : i + 1]) for i in range(3)]
        if "attention" in size.works:
            result += [
                side.attention(x),
                torch.autograd.grad(side.attention(x).square().sum(), x)[0],
            ]
        results.append(result)
    for a, b in zip(*results, strict=True):
        worst = max(worst, (a - b).abs().max().item())
    return worst


def prepared(side: Side, work: str, precision: str = "float32") -> Callable[[], object]:
    """One call of the work, with full memory. For use within :func:`at`, like this function."""
    size = side.size
    if work == "train":
        side.model.train()
        side.forget(size.batch_size)
        optimizer = side.optimizer()
        text = segments(size, size.batch_size, size.segment_length)

        def call() -> None:
            with autocast(precision):
                loss = side.loss(*text())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(full_after(size)):
            call()
        return call

    if work == "attention":
        shape = (size.batch_size, size.segment_length, size.d_model)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        side.model.train()

        def layer() -> None:
            with autocast(precision):
                y = side.attention(x)
            y.backward(upstream)

        return layer

    side.model.eval()
    if work == "evaluate":
        side.forget(size.batch_size)
        text = segments(size, size.batch_size, size.segment_length)
        for _ in range(full_after(size)):
            side.read(*text())
        return lambda: side.read(*text())

    side.forget(size.generate_batch)
    text = segments(size, size.generate_batch, size.segment_length)
    for _ in range(max(1, full_after(size))):
        logits = side.read(text()[0])
    token = logits[:, -1:].argmax(-1)

    def step() -> None:
        nonlocal token
        token = side.read(token).argmax(-1)

    return step


def full_after(size: Size) -> int:
    """Segments until memory is full, compressed memory at one slot for four tokens."""
    return -(-(size.memory_length + 4 * size.compressed_length) // size.segment_length)


def tokens_per_call(size: Size, work: str) -> int:
    return size.generate_batch if work == "generate" else size.batch_size * size.segment_length


def peak_megabytes(architecture: str, name: str, size: str, precision: str) -> float:
    """Memory that training takes beyond the model, in a fresh process."""
    command = [sys.executable, __file__, "--peak", architecture, name, size, precision]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(said.split()[-1])


def report_peak(architecture: str, name: str, size: str, precision: str) -> None:
    """The process that :func:`peak_megabytes` starts."""
    torch.set_num_threads(1)
    side = side_class(architecture, name)(SIZES[architecture][size])
    # Libraries loaded at the first backward pass and step do not count.
    x = torch.nn.Linear(8, 8)
    torch.nn.functional.cross_entropy(x(torch.ones(1, 8)), torch.zeros(1).long()).backward()
    torch.optim.AdamW(x.parameters(), fused=True).step()
    reset_peak()
    before = peak_bytes()
    with at(precision, "train"):
        call = prepared(side, "train", precision)
        for _ in range(3):
            call()
    print((peak_bytes() - before) / 2**20)


def reset_peak() -> None:
    """Linux: forget the peak that imports may have caused."""
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The process's largest resident size.

    Not Linux's ``ru_maxrss``: after fork and exec that starts with the parent's.
    """
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(
    architecture: str,
    size_name: str,
    works: list[str],
    peers: list[str],
    precisions: Sequence[str],
    rounds: int,
    console: Console,
) -> list[Row]:
    """All rows of one architecture and size."""
    size = SIZES[architecture][size_name]
    works = [work for work in works if work in size.works]
    classes = {n: side_class(architecture, n) for n in ["memspan", *([] if size.alone else peers)]}
    classes = {n: kind for n, kind in classes.items() if set(works) & set(kind.works)}
    if not works or (list(classes) == ["memspan"] and not size.alone):
        return []
    torch.manual_seed(1)
    for name, kind in classes.items():
        if kind.same_function:
            # Everyone draws dropout's numbers in an order of their own.
            alike = replace(size, dropout=0.0)
            with at("float32", "train"):
                worst = check(classes["memspan"](alike), kind(alike), alike)
            console.print(f"{size_name}: memspan and {name} differ by at most {worst:.1e}")
            if not worst < TOLERANCE:
                raise SystemExit(
                    f"{size_name}: memspan and {name} differ by {worst:.1e}, more than {TOLERANCE}: "
                    "nothing is measured"
                )
    rows: list[Row] = []
    for work in works:
        able = {name: kind for name, kind in classes.items() if work in kind.works}
        if list(able) == ["memspan"] and not size.alone:
            continue
        console.print(f"{size_name}: {work}")
        calls: dict[Key, Callable[[], object]] = {}
        for name, kind in able.items():
            for precision in dict.fromkeys([*precisions, own_precision(name, work)]):
                with at(precision, work):
                    calls[name, precision] = prepared(kind(size), work, precision)
        peaks: dict[Key, float] = {}
        multiplied = 0
        if work == "train":
            peaks = {key: peak_megabytes(architecture, key[0], size_name, key[1]) for key in calls}
            ours = [precision for name, precision in calls if name == "memspan"]
            multiplied = operations(calls["memspan", ours[0]])
            calls |= {(LARGE_PRODUCT, p): large_product(p) for p in ours}
        times = interleaved(calls, rounds, within=lambda key, work=work: at(key[1], work))
        label = {"architecture": architecture, "work": work, "size": size_name}
        tokens = tokens_per_call(size, work)
        same_function = {n: kind.same_function for n, kind in able.items() if n != "memspan"}
        rows += compared(label, times, precisions, tokens, same_function, peaks, multiplied)
    return rows


def compared(
    label: Row,
    times: Mapping[Key, list[float]],
    precisions: Sequence[str],
    tokens: int,
    same_function: Mapping[str, bool],
    peaks: Mapping[Key, float],
    multiplied: int,
) -> list[Row]:
    """The rows of one kind of work: every precision with all peers, then without options.

    Args:
        label: what all rows begin with.
        times: seconds per call of every side in its precisions, by rounds, and of the large product.
        precisions: those that all sides were measured in.
        tokens: of one call.
        same_function: the peers, and whether they compute what ours does; none: ours alone.
        peaks: megabytes, where measured.
        multiplied: operations of our step's matrix products; 0: not counted.
    """
    rows: list[Row] = []
    for peer in same_function or [None]:
        mine, theirs = (own_precision(name or "memspan", label["work"]) for name in (None, peer))
        for c in comparisons(precisions, mine, theirs):
            our_times = times["memspan", c.precision]
            row = label | {
                **asdict(c),
                "rounds": len(our_times),
                "tokens_per_second": round(tokens / median(our_times), 1),
                "peak_megabytes": _rounded(peaks.get(("memspan", c.precision)), 1),
            }
            if multiplied:
                rate = [LARGE_OPERATIONS / t for t in times[LARGE_PRODUCT, c.precision]]
                shares = [multiplied / r / t for r, t in zip(rate, our_times, strict=True)]
                row["product_gflops"] = round(median(rate) / 1e9, 1)
                row["products_share"] = round(median(shares), 3)
            if peer is None:
                del row["peer_precision"]
            else:
                their_times = times[peer, c.peer_precision]
                r = ratio(their_times, our_times)
                row |= {
                    "peer": peer,
                    "ratio": round(r.middle, 3),
                    "low": round(r.low, 3),
                    "high": round(r.high, 3),
                    "peer_tokens_per_second": round(tokens / median(their_times), 1),
                    "same_function": same_function[peer],
                    "peer_peak_megabytes": _rounded(peaks.get((peer, c.peer_precision)), 1),
                }
            rows.append(row)
    return sorted(rows, key=_view_and_precision)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _view_and_precision(row: Row) -> tuple[bool, int]:
    return row["setting"] != "same", PRECISIONS.index(row["precision"])


def views(rows: list[Row]) -> list[Table | str]:
    """What is printed: all in the same setting, then each as it comes."""
    same = table("the same setting for all", [row for row in rows if row["setting"] == "same"])
    own = [row for row in rows if row["as_it_comes"]]
    both = [row["precision"] for row in own if row["setting"] == "same"]
    if len(both) == len(own):
        return [
            same,
            "As it comes, each library by its own defaults: that is "
            f"{' or '.join(dict.fromkeys(both))} for all on this processor, the rows above, "
            "measured once.",
        ]
    shown: list[Table | str] = [same, table("each library as it comes", own)]
    if both:
        shown.append(
            "Rows with one precision for both are those of the first table, measured once."
        )
    return shown


def table(title: str, rows: list[Row]) -> Table:
    """More than 1: memspan is faster."""
    shown = Table(title=f"{title}: memspan against its peers, one thread (ratio: times as fast)")
    for column in ("architecture", "size", "work", "precision", "peer"):
        shown.add_column(column, no_wrap=True)
    for column in ("ratio", "low-high", "tokens/s", "peer's", "peak MB", "peer's", "products"):
        shown.add_column(column, justify="right")
    for row in rows:
        peer = row.get("peer")
        precisions = dict.fromkeys([row["precision"], row.get("peer_precision", row["precision"])])
        peaks = (row["peak_megabytes"], row.get("peer_peak_megabytes"))
        shown.add_row(
            *(row[column] for column in ("architecture", "size", "work")),
            " : ".join(precisions),
            peer or "",
            f"{row['ratio']:.2f}" if peer else "",
            f"{row['low']:.2f}-{row['high']:.2f}" if peer else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peer_tokens_per_second']:,.0f}" if peer else "",
            *("" if p is None else f"{p:,.0f}" for p in peaks),
            f"{row['products_share']:.0%}" if "products_share" in row else "",
        )
    return shown


def main() -> None:
    sizes = list(dict.fromkeys(name for own in SIZES.values() for name in own))
    peers = sorted({n for sides in ARCHITECTURES.values() for n in sides} - {"memspan"})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures",
        nargs="+",
        choices=ARCHITECTURES,
        default=list(ARCHITECTURES),
        metavar="NAME",
        help=f"any of {', '.join(ARCHITECTURES)} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=sizes,
        default=sizes,
        metavar="SIZE",
        help=f"any of {', '.join(sizes)}, where the architecture has it (default: all)",
    )
    parser.add_argument(
        "--work",
        nargs="+",
        choices=WORKS,
        default=list(WORKS),
        metavar="WORK",
        help=f"any of {', '.join(WORKS)} (default: all)",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=peers,
        default=peers,
        metavar="PEER",
        help=f"any of {', '.join(peers)} (default: all)",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        metavar="PRECISION",
        help=f"the same settings: any of {', '.join(PRECISIONS)} (default: those that this processor "
        "has use for)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).resolve().parent / "results" / "latest.json",
        metavar="PATH",
        help="where the rows go (default: benchmarks/results/latest.json)",
    )
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.peak:
        report_peak(*options.peak)
        return
    torch.set_num_threads(1)
    console = Console()
    here = processor()
    precisions = options.precision or here.precisions
    console.print(f"the same settings: {', '.join(precisions)} (processor: {here.capability})")
    if set(precisions) - set(here.precisions):
        console.print(
            "warning: PyTorch has no fast bfloat16 products for this processor: medium changes "
            "nothing, and bfloat16 is many times slower than float32",
            style="yellow",
        )
    rows: list[Row] = []
    for architecture in options.architectures:
        listed = [p for p in ARCHITECTURES[architecture] if p in options.peers]
        for size in [name for name in SIZES[architecture] if name in options.sizes]:
            rows += measure(
                architecture, size, options.work, listed, precisions, options.rounds, console
            )
    if not rows:
        parser.error(
            "nothing to measure: no architecture has these sizes, works and peers together"
        )
    wide = Console(width=None if console.is_terminal else 150)
    for view in views(rows):
        wide.print(view)
    write(options.json, rows)
    console.print(f"written: {options.json}")


if __name__ == "__main__":
    main()
