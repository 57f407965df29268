"""Speed and memory of memspan against its peers, on one CPU thread.

Work: train, a segment forward, backward and an AdamW step; attention, one attention layer forward and
backward by itself; evaluate, the losses of a segment without gradients; generate, one token. All with
full memory, carried from call to call, where the peer has one. Ratios are the peer's CPU time over ours
within one round, sides taking turns; shown are the median and the lowest and highest round. Where a
peer computes the same function, its weights are copied into our model first and logits, losses and a
gradient are compared in float32: on a difference nothing is measured. Peak memory is what training
takes beyond the model itself, each side in a process of its own.

Every library has the same precision of matrix products, each of --precision in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

import timing
from memspan.precision import multiplies_bfloat16
from page_tables import markdown
from peak_memory import MIB, peak_of
from peers.registry import ARCHITECTURES, SIZES, side_class
from peers.side import Side, Size
from timing import interleaved, ratio, write
from works import (
    LARGE_OPERATIONS,
    LARGE_PRODUCT,
    PRECISIONS,
    WORKS,
    at,
    large_product,
    operations,
    prepared,
    segments,
    tokens_per_call,
)

Row = dict[str, Any]
Key = tuple[str, str]
"""A side, or the large product, and its precision."""

TOLERANCE = 1e-4


def check(ours: Side, theirs: Side, size: Size) -> float:
    """Copy their weights into ours, compare, and return the largest difference.

    Compared over three segments, the first with an empty memory: losses and the embedding's gradient
    in training; logits; then the logits of three single tokens.
    """
    theirs.weights_to(ours.model)
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
        result += [side.read(text()[0]) for _ in range(3)]
        tokens, _ = text()
        result += [side.read(tokens[:, i : i + 1]) for i in range(3)]
        if "attention" in size.works:
            y = side.attention(x)
            result += [y, *torch.autograd.grad(y.square().sum(), x)]
        results.append(result)
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def trained(architecture: str, name: str, size: str, precision: str) -> Callable[[], None]:
    """A few steps of a side, whose peak is taken."""
    side = side_class(architecture, name)(SIZES[architecture][size])

    def steps() -> None:
        with at(precision, "train"):
            call = prepared(side, "train", precision)
            for _ in range(3):
                call()

    return steps


def measure(
    architecture: str,
    size_name: str,
    works: list[str],
    peers: list[str],
    precisions: Sequence[str],
    rounds: int,
) -> list[Row]:
    """All rows of one architecture and size."""
    size = SIZES[architecture][size_name]
    works = [work for work in works if work in size.works]
    classes = {n: side_class(architecture, n) for n in ["memspan", *([] if size.alone else peers)]}
    classes = {n: kind for n, kind in classes.items() if set(works) & set(kind.works)}
    torch.manual_seed(1)
    for name, kind in classes.items():
        if kind.same_function:
            # Everyone draws dropout's numbers in an order of their own.
            alike = replace(size, dropout=0.0)
            with at("float32", "train"):
                worst = check(classes["memspan"](alike), kind(alike), alike)
            print(f"{size_name}: memspan and {name} differ by at most {worst:.1e}", flush=True)
            if not worst < TOLERANCE:
                raise SystemExit(f"more than {TOLERANCE}: nothing is measured")
    rows: list[Row] = []
    for work in works:
        able = {name: kind for name, kind in classes.items() if work in kind.works}
        if list(able) == ["memspan"] and not size.alone:
            continue
        print(f"{size_name}: {work}", flush=True)
        calls: dict[Key, Callable[[], object]] = {}
        for name, kind in able.items():
            for precision in precisions:
                with at(precision, work):
                    calls[name, precision] = prepared(kind(size), work, precision)
        peaks: dict[Key, float] = {}
        multiplied = 0
        if work == "train":
            peaks = {k: peak_of(trained, architecture, k[0], size_name, k[1]) / MIB for k in calls}
            multiplied = operations(calls["memspan", precisions[0]])
            calls |= {(LARGE_PRODUCT, p): large_product(p) for p in precisions}
        times = interleaved(calls, rounds, within=lambda key, work=work: at(key[1], work))
        label = {"architecture": architecture, "work": work, "size": size_name}
        tokens = tokens_per_call(size, work)
        same_function = {n: kind.same_function for n, kind in able.items() if n != "memspan"}
        for precision in precisions:
            own = {name: found for (name, p), found in times.items() if p == precision}
            peak = {name: round(found, 1) for (name, p), found in peaks.items() if p == precision}
            row = label | {"precision": precision}
            rows += compared(row, own, tokens, same_function, peak, multiplied)
    return rows


def compared(
    label: Row,
    times: Mapping[str, list[float]],
    tokens: int,
    same_function: Mapping[str, bool],
    peaks: Mapping[str, float],
    multiplied: int,
) -> list[Row]:
    """The rows of one kind of work in one precision, of every peer.

    Args:
        label: what all rows begin with.
        times: seconds per call of every side, by rounds, and of the large product.
        tokens: of one call.
        same_function: the peers, and whether they compute what ours does; none: ours alone.
        peaks: megabytes, where measured.
        multiplied: operations of our step's matrix products; 0: not counted.
    """
    ours = times["memspan"]
    row = label | {
        "rounds": len(ours),
        "tokens_per_second": round(tokens / median(ours), 1),
        "peak_megabytes": peaks.get("memspan"),
    }
    if multiplied:
        rate = [LARGE_OPERATIONS / t for t in times[LARGE_PRODUCT]]
        shares = [multiplied / r / t for r, t in zip(rate, ours, strict=True)]
        row["product_gflops"] = round(median(rate) / 1e9, 1)
        row["products_share"] = round(median(shares), 3)
    if not same_function:
        return [row]
    rows = []
    for peer, same in same_function.items():
        rows.append(
            row
            | {
                "peer": peer,
                **ratio(times[peer], ours).row(3),
                "peer_tokens_per_second": round(tokens / median(times[peer]), 1),
                "same_function": same,
                "peer_peak_megabytes": peaks.get(peer),
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """More than 1: memspan is faster."""
    label = ("architecture", "size", "work", "precision", "peer")
    numbers = (
        "tokens_per_second",
        "peer_tokens_per_second",
        "peak_megabytes",
        "peer_peak_megabytes",
    )
    lines = [[*label, "ratio", "low-high", "tokens/s", "peer's", "peak MB", "peer's", "products"]]
    for row in rows:
        ratios = ["", ""]
        if "peer" in row:
            ratios = [f"{row['ratio']:.2f}", f"{row['low']:.2f}-{row['high']:.2f}"]
        counts = ["" if (n := row.get(name)) is None else f"{n:,.0f}" for name in numbers]
        share = f"{row['products_share']:.0%}" if "products_share" in row else ""
        lines.append([*(row.get(name, "") for name in label), *ratios, *counts, share])
    return markdown(lines)


def main() -> None:
    peers = {n for sides in ARCHITECTURES.values() for n in sides} - {"memspan"}
    sizes = dict.fromkeys(name for own in SIZES.values() for name in own)
    names_of = {
        "--architectures": list(ARCHITECTURES),
        "--sizes": list(sizes),
        "--work": list(WORKS),
        "--peers": sorted(peers),
    }
    parser = timing.parser(__doc__, rounds=7, results="latest.json")
    for option, names in names_of.items():
        about = f"any of {', '.join(names)} (default: all)"
        parser.add_argument(
            option, nargs="+", choices=names, default=names, metavar="NAME", help=about
        )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=list(PRECISIONS if multiplies_bfloat16() else PRECISIONS[:1]),
        help="default: those that are fast on this processor",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for architecture in options.architectures:
        listed = [p for p in ARCHITECTURES[architecture] if p in options.peers]
        for size in [name for name in SIZES[architecture] if name in options.sizes]:
            chosen = options.work, listed, options.precision, options.rounds
            rows += measure(architecture, size, *chosen)
    if not rows:
        parser.error("nothing to measure: no architecture has these sizes, works and peers")
    print(table(rows))
    write(options.json, rows)
    print(f"written: {options.json}")


if __name__ == "__main__":
    main()
