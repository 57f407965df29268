"""Data for the documentation's figures: a short passage, read by the runs that come with memspan.

    python benchmarks/figures.py        # writes docs/figures/NAME.json; `make figures` draws them, too

Each run reads the passage in segments of 24 tokens, with a memory of 24 slots. That is less than in
training, so that all of it can be drawn: what each token attends to, and for Fast Weights and Gated
DeltaNet what one head writes to its matrix. For the Compressive Transformer it is also read with the
compressed slots of another passage. The span figure has curves of docs/recall/recall.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import memspan
import timing
from inside import gated_delta_net, rule_calls
from memspan.models.fast_weights import layer as fast_weights
from trainings import rows_in

FORM = 2
"""Version of the files' format; docs/docsite/figures.py has the same number."""
DOCS = Path(__file__).resolve().parents[1] / "docs"
PASSAGE = (
    "GREMIO:\nGood morrow, neighbour Baptista.\n\n"
    "BAPTISTA:\nGood morrow, neighbour Gremio.\nGod save you, gentlemen!\n\n"
    "PETRUCHIO:\nAnd you, good sir! Pray,"
)
"""The text that is read; none of the runs was trained on it."""
NEIGHBOUR = (20_000, 24 * 10)
"""Where another passage of the held-out text begins, for its compressed slots, and its length: enough
to fill them."""
SEGMENT = 24
"""Tokens of a segment, slots of memory, and what a line of the figures has."""
RUNS = {
    fast_weights: "shakespeare-fast-weights",
    gated_delta_net: "shakespeare-gated-delta-net",
}
LAYER = 0
HEAD = 5
"""Head whose matrix is drawn, from 0."""
GATED = (2, 3)
"""The same of Gated DeltaNet."""
ASKED = {
    "story": "Kate is in Padua. Tom is in Rome. Ann is in Pisa. Bob is in Milan.\n"
    "It rains. Kate is in Rome. Eve is in Venice. Tom is in Pisa.\n"
    "It rains. Max is in Siena. Ada is in Padua. Ann is in Venice.",
    "asked": "Kate",
    "step": 11,
}
"""The text that the model in the page reads at first."""
CHUNK = (42, 8)
"""The delta rule's chunk: its first token and its length."""
STORY = {
    "story": "Kate is in Padua. Tom is in Rome. Ann is in Pisa. Bob is in Milan.\n"
    "Kate is in Rome. Eve is in Venice. Tom is in Pisa. A new scene.\n"
    "Max is in Milan. Ada is in Padua. Ann is in Venice. Max is in Rome.",
    "step": 6,
    "asked": "Tom",
    "M": 4,
    "C": 2,
    "c": 2,
    "K": 8,
    "beta": 1,
    "alpha": 1,
    "sceneAlpha": 0.1,
}
"""Story that five memories are told, and their sizes."""
CURVES = ("transformer-xl", "compressive-convolution", "feedback", "transformer")
"""Curves of docs/recall/recall.json that have an edge in theory."""


def tokens_of(run: memspan.Run) -> Tensor:
    """The passage, ``[1, T]``: a token is a byte, which here is a character."""
    return torch.tensor(run.tokenizer.encode(PASSAGE.encode()).tolist())[None]


@torch.no_grad()
def attention(name: str, layer: int, **sizes: int) -> dict[str, Any]:
    """Attention of each token, in percent by layer, the mean over heads.

    Args:
        name: of a run that comes with memspan.
        layer: of the static picture, from 1.
        sizes: of the memory, for ``initial_memory``.
    """
    run = memspan.load(name)
    backbone = run.model.backbone
    tokens = tokens_of(run)
    memory = backbone.initial_memory(1, **sizes)
    steps: list[dict[str, Any]] = []
    for begin in range(0, tokens.shape[1], SEGMENT):
        segment = tokens[:, begin : begin + SEGMENT]
        steps += looks(run, segment, memory, begin)
        memory = backbone(run.model.embedding(segment), memory).memory
    trained = {"T": run.config.train.segment_length, "M": run.config.model.memory_length}
    shown = {"T": SEGMENT, "M": SEGMENT}
    if "compressed_length" in sizes:
        trained["C"] = run.config.model.compressed_length
        shown["C"] = sizes["compressed_length"]
    return {
        "kind": "attention",
        "run": name,
        "text": PASSAGE,
        "line": SEGMENT,
        "kinds": [*backbone.attention_weights(run.model.embedding(tokens[:, :1]), memory).kinds],
        "rate": getattr(backbone.config, "compression_rate", 1),
        "sizes": {"trained": trained, "shown": shown},
        "shown": {"token": typical(steps, layer), "layer": layer},
        "steps": steps,
    }


def looks(run: memspan.Run, tokens: Tensor, memory: Any, begin: int) -> list[dict[str, Any]]:
    """Count the slots and tokens that each token ``[1, T]`` attends to, with its weights by layer."""
    backbone = run.model.backbone
    rate = getattr(backbone.config, "compression_rate", 1)
    found = backbone.attention_weights(run.model.embedding(tokens), memory)
    means = torch.stack([layer[0].mean(0) for layer in found.layers])
    distances = found.distances[0].expand(means.shape[1:])
    compressed = found.kinds.get("compressed", torch.zeros(1, 1))[0].expand(means.shape[2])
    steps = []
    for t, back in enumerate(distances):
        there = (back >= 0) & (back <= begin + t)
        n_compressed = int(compressed[there].sum())
        # A compressed slot's distance is that of its middle.
        oldest = begin + t - back[there][:1] - (rate - 1) / 2 * bool(n_compressed)
        steps.append(
            {
                "first": int(oldest[0]) if len(oldest) else begin + t,
                "compressed": n_compressed,
                "weights": (100 * means[:, t, there]).round().int().tolist(),
            }
        )
    return steps


def typical(steps: list[dict[str, Any]], layer: int) -> int:
    """A token of the passage's second half whose strongest weight in this layer is the median."""
    later = range(len(steps) // 2, len(steps))
    strongest = {token: max(steps[token]["weights"][layer - 1]) for token in later}
    return min(later, key=lambda token: abs(strongest[token] - median(strongest.values())))


@torch.no_grad()
def compressive() -> dict[str, Any]:
    """The same, and with another passage's compressed slots in place of its own.

    ``bits`` are the two losses at each token, in bits: with its own slots, and with the others.
    """
    sizes = {"memory_length": SEGMENT, "compressed_length": SEGMENT // 2}
    data = attention("shakespeare-compressive", 2, **sizes)
    run = memspan.load("shakespeare-compressive")
    model = run.model
    tokens = tokens_of(run)
    held_out = (run.folder.parent / "tiny-shakespeare-held-out.txt").read_bytes()
    begin, length = NEIGHBOUR
    other = torch.tensor([[*held_out[begin : begin + length]]])
    neighbour = model(other, model.initial_memory(1, **sizes)).memory
    memory = model.initial_memory(1, **sizes)
    for start in range(0, tokens.shape[1], SEGMENT):
        segment = tokens[:, start : start + SEGMENT]
        # As many as there are, so that the passage's beginning stays one.
        there = torch.arange(SEGMENT // 2) >= SEGMENT // 2 - memory.compressed_length[0]
        swapped = dataclasses.replace(
            memory, compressed=torch.where(there[:, None], neighbour.compressed, memory.compressed)
        )
        targets = tokens[:, start + 1 : start + SEGMENT + 1]
        losses = [
            model(segment[:, : targets.shape[1]], m, targets=targets).losses[0]
            for m in (memory, swapped)
        ]
        bits = (torch.stack(losses, 1) / math.log(2)).tolist()
        for i, step in enumerate(looks(run, segment, swapped, start)):
            if step["compressed"]:
                data["steps"][start + i]["swapped"] = step["weights"]
            if i < len(bits):
                data["steps"][start + i]["bits"] = [round(b, 2) for b in bits[i]]
        memory = model(segment, memory).memory
    data["shown"]["slots"] = 0
    return data


@torch.no_grad()
def head_inputs(rule: ModuleType, place: tuple[int, int]) -> dict[str, Tensor]:
    """A head's inputs: features of queries and keys ``[T, F]``, values, betas, and decays, if any.

    Args:
        rule: the module of its layers.
        place: the layer and the head.
    """
    layer, head = place
    run = memspan.load(RUNS[rule])
    call = rule_calls(rule, run.model, tokens_of(run))[1][layer]
    q, k, v, beta, _ = call.args
    features = call.kwargs.get("feature_map", torch.Tensor.clone)
    heads = {"q": features(q), "k": features(k), "v": v, "beta": beta}
    if "log_decay" in call.kwargs:
        heads["decay"] = call.kwargs["log_decay"].exp()
    return {part: of_heads[0, head] for part, of_heads in heads.items()}


def writes(
    k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The write of each token ``[T, V]`` and the matrix after it ``[T, F, V]``."""
    matrix = v.new_zeros(k.shape[1], v.shape[1])
    written = []
    after = []
    decay = torch.ones_like(beta) if decay is None else decay
    for k_t, v_t, beta_t, decay_t in zip(k, v, beta, decay, strict=True):
        matrix = decay_t * matrix
        written.append(beta_t * (v_t - k_t @ matrix))
        matrix = matrix + k_t[:, None] * written[-1]
        after.append(matrix)
    return torch.stack(written), torch.stack(after)


def kept(k: Tensor, beta: Tensor, decay: Tensor | None = None) -> list[list[int]]:
    """Percentage of each earlier token's write that its key still reads, after each token."""
    left = k.new_zeros(0, k.shape[1])
    rows = []
    decay = torch.ones_like(beta) if decay is None else decay
    for t, (k_t, beta_t, decay_t) in enumerate(zip(k, beta, decay, strict=True)):
        left = decay_t * left
        left = torch.cat([left - beta_t * (left @ k_t)[:, None] * k_t, k_t[None]])
        share = (left * k[: t + 1]).sum(1) / (k[: t + 1] ** 2).sum(1)
        rows.append((100 * share).round().int().tolist())
    return rows


def matrix(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """One head's matrix, which is the sum of its writes, and what is left of each."""
    k, v, beta = (inputs[name] for name in ("k", "v", "beta"))
    decay = inputs.get("decay")
    written, _ = writes(k, v, beta, decay)
    decays = {} if decay is None else {"decay": [round(x, 4) for x in decay.tolist()]}
    return {
        "kind": "matrix",
        "text": PASSAGE,
        "line": SEGMENT,
        "shown": {"token": 115},
        "keys": rounded(k),
        "written": rounded(written),
        **decays,
        "kept": kept(k, beta, decay),
    }


def delta_rule() -> dict[str, Any]:
    """A chunk of the same head, and the matrix before it."""
    inputs = head_inputs(fast_weights, (LAYER, HEAD))
    begin, length = CHUNK
    _, after = writes(inputs["k"], inputs["v"], inputs["beta"])
    chunk = {name: rounded(part[begin : begin + length]) for name, part in inputs.items()}
    return {
        "kind": "chunk",
        "text": PASSAGE[begin : begin + length],
        "shown": {"step": 4},
        "matrix": rounded(after[begin - 1]),
        **chunk,
    }


def span() -> dict[str, Any]:
    """Measured curves, the mean of the seeds, and the sizes they were measured with."""
    rows = rows_in(DOCS / "recall" / "recall.json")
    seeds = defaultdict(list)
    for row in rows:
        if row["panel"] == "time" and row["model"] in CURVES:
            seeds[row["model"]].append(row["curve"])
    curves = {
        model: [[at[0][0], round(mean(y for _, y in at), 4)] for at in zip(*runs, strict=True)]
        for model, runs in seeds.items()
    }
    return {
        "kind": "span",
        "shown": {"M": 128, "T": 64, "L": 2, "C": 128, "c": 4},
        "curves": curves,
    }


def rounded(x: Tensor) -> Any:
    """Three digits after the point: what a picture can show."""
    return [
        [round(n, 3) for n in row] if isinstance(row, list) else round(row, 3) for row in x.tolist()
    ]


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "span": span,
    "transformer-xl": lambda: attention("shakespeare", 4, memory_length=SEGMENT),
    "compressive": compressive,
    "feedback": lambda: attention("shakespeare-feedback", 2, memory_length=SEGMENT),
    "fast-weights": lambda: matrix(head_inputs(fast_weights, (LAYER, HEAD))),
    "gated-delta-net": lambda: matrix(head_inputs(gated_delta_net, GATED)),
    "delta-rule": delta_rule,
    # Two keys of length 1 at an angle, each written once: all else is computed while it is drawn.
    "overlap": lambda: {"kind": "overlap", "shown": {"angle": 60, "beta": 1}},
    # Likewise: sentences in, answers out.
    "story": lambda: {"kind": "story", "shown": STORY},
    # The model's weights are put in where it is drawn.
    "asked": lambda: {"kind": "asked", "model": "recall-gated-delta-net", "shown": ASKED},
}


def main() -> None:
    """Write the files, or some of them."""
    parser = timing.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=[*FIGURES], metavar="NAME")
    for name in parser.parse_args().only:
        path = DOCS / "figures" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        content = {"form": FORM, **FIGURES[name]()}
        path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
