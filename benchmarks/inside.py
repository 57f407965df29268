"""Look inside the runs that come with memspan, on the last tenth of Tiny Shakespeare.

    python benchmarks/inside.py joined [RUN ...]    # text without line breaks
    python benchmarks/inside.py blind               # memory emptied before every segment
    python benchmarks/inside.py decays              # how long each head of Gated DeltaNet remembers

joined: sixteen passages, as they are and with their lines joined by spaces, from an empty memory: nats
per byte, by distance from the start. For Fast Weights also what is left of that when one head's matrix
alone is emptied every 64 bytes, for the head where that helps most.

blind: nats per byte in one stream, memory emptied in scoring alone.

decays: of the first 16,384 bytes, after how many bytes half of a head's matrix is left, by the mean
logarithm of its decay, and the bytes that leave least of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import memspan
import timing
from memspan.lab.data.named import HELD_OUT
from memspan.lab.evaluation import score_tokens
from memspan.lab.runs.folder import SHIPPED
from memspan.models import LanguageModel
from memspan.models.gated_delta_net import layer as gated_delta_net
from page_tables import markdown

ROWS = 16
LENGTH = 1217
STEP = 64
EDGES = (0, 64, 256, 512, LENGTH - 1)


def passages(*, joined: bool) -> Tensor:
    """Bytes, ``[ROWS, LENGTH]``."""
    text = HELD_OUT.read_bytes()
    every = len(text) // ROWS
    parts = [text[n * every : (n + 1) * every] for n in range(ROWS)]
    return torch.tensor([list((b" ".join(p.split()) if joined else p)[:LENGTH]) for p in parts])


@torch.no_grad()
def losses(model: LanguageModel, tokens: Tensor, emptied: tuple[int, int] | None = None) -> Tensor:
    """Nats ``[ROWS, LENGTH - 1]``; a layer's head is emptied every 64 bytes."""
    memory = None
    found = []
    for begin in range(0, LENGTH - 1, STEP):
        if emptied is not None and memory is not None:
            weights = memory.weights.clone()
            weights[:, *emptied] = 0
            memory = dataclasses.replace(memory, weights=weights)
        part = tokens[:, begin : begin + STEP + 1]
        output = model(part[:, :-1], memory, targets=part[:, 1:])
        memory = output.memory
        found.append(output.losses)
    return torch.cat(found, 1)


def joined(names: list[str]) -> None:
    shown = [f"{a}-{b}" for a, b in itertools.pairwise(EDGES)]
    rows = [["run and text", *shown, "spaces"]]

    def add(what: str, found: Tensor, tokens: Tensor) -> None:
        """By distance, and on spaces from 512 bytes on."""
        means = [found[:, a:b].mean() for a, b in itertools.pairwise(EDGES)]
        means.append(found[:, 512:][tokens[:, 513:] == ord(" ")].mean())
        rows.append([what, *(f"{mean:.2f}" for mean in means)])

    for name in names:
        run = memspan.load(name)
        model = run.model.eval()
        for lines in (True, False):
            tokens = passages(joined=not lines)
            add(f"{name}, {'lines' if lines else 'joined'}", losses(model, tokens), tokens)
        if run.config.architecture == "fast-weights":
            sizes = range(run.config.model.n_layers), range(run.config.model.n_heads)
            without = {place: losses(model, tokens, place) for place in itertools.product(*sizes)}
            (layer, head), found = min(without.items(), key=lambda pair: float(pair[1].mean()))
            add(f"without head {head + 1} of layer {layer + 1}", found, tokens)
    print(markdown(rows))


def blind() -> None:
    text = np.frombuffer(HELD_OUT.read_bytes(), np.uint8)
    rows = [["run", "carried", "emptied in scoring", ""]]
    for name in ("shakespeare-gated-delta-net", "shakespeare-fast-weights"):
        run = memspan.load(name)
        length = run.config.train.segment_length
        carried, emptied = (
            score_tokens(
                run.model,
                text,
                run.tokenizer,
                document_starts=starts,
                batch_size=1,
                segment_length=length,
            ).nats_per_token
            for starts in (None, np.arange(0, len(text), length))
        )
        rows.append([f"`{name}`", *(f"{x:.3f}" for x in (carried, emptied, emptied - carried))])
    print(markdown(rows))


@torch.no_grad()
def rule_calls(
    module: ModuleType, model: LanguageModel, tokens: Tensor, memory: object = None
) -> tuple[object, list]:
    """The memory after the tokens, and the calls of the delta rule by layer, from a module."""
    with mock.patch.object(module, "delta_rule", wraps=module.delta_rule) as called:
        memory = model(tokens, memory).memory
    return memory, called.call_args_list


def decays(length: int = 16_384) -> None:
    text = HELD_OUT.read_bytes()[:length]
    model = memspan.load("shakespeare-gated-delta-net").model
    memory = None
    found = []
    for tokens in torch.tensor([[*text]]).split(256, 1):
        memory, calls = rule_calls(gated_delta_net, model, tokens, memory)
        found.append(torch.stack([call.kwargs["log_decay"][0] for call in calls]))
    often = [b for b in sorted({*text}) if text.count(b) >= length // 200]
    rows = [["layer", "head", "half is left after", "mean decay", "bytes that leave least"]]
    for layer, heads in enumerate(torch.cat(found, 2), 1):
        for head, own in enumerate(heads, 1):
            by_byte = {b: own[torch.tensor([c == b for c in text])].mean().exp() for b in often}
            least = sorted(often, key=lambda b: float(by_byte[b]))[:3]
            named = ", ".join(f"`{chr(b)!r}` {by_byte[b]:.2f}" for b in least)
            half = f"{math.log(0.5) / own.mean():,.1f} bytes"
            mean = f"{own.mean().exp():.3f}"
            rows.append([str(layer), str(head), half, mean, named])
    print(markdown(rows))


def main() -> None:
    parser = timing.parser(__doc__)
    works: dict[str, Callable[..., None]] = {"joined": joined, "blind": blind, "decays": decays}
    parser.add_argument("work", choices=works)
    parser.add_argument("runs", nargs="*", default=list(SHIPPED), help="of joined")
    options = parser.parse_args()
    torch.set_num_threads(1)
    works[options.work](*([options.runs] if options.work == "joined" else []))


if __name__ == "__main__":
    main()
