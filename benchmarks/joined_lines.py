"""Runs on text without line breaks, and which head of Fast Weights counts the bytes since the last one.

    python benchmarks/joined_lines.py [RUN ...]         # default: the runs that come with memspan

Sixteen passages of the last tenth of Tiny Shakespeare, as they are and with their lines joined by
spaces, from an empty memory: nats per byte, by distance from the start. For Fast Weights also what is
left of that when one head's matrix alone is emptied every 64 bytes, for the head where that helps most.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import memspan
from memspan.data.named import HELD_OUT
from memspan.models import LanguageModel
from memspan.runs.folder import SHIPPED

ROWS, LENGTH, STEP = 16, 1217, 64
EDGES = (0, 64, 256, 512, LENGTH - 1)


def passages(*, joined: bool) -> Tensor:
    """Bytes, ``[ROWS, LENGTH]``."""
    text = HELD_OUT.read_bytes()
    every = len(text) // ROWS
    parts = [text[n * every : (n + 1) * every] for n in range(ROWS)]
    return torch.tensor([list((b" ".join(p.split()) if joined else p)[:LENGTH]) for p in parts])


@torch.no_grad()
def losses(model: LanguageModel, tokens: Tensor, change: Callable[[Tensor], None] | None) -> Tensor:
    """Nats ``[ROWS, LENGTH - 1]``; ``change`` alters weights ``[B, L, H, F, V]`` every 64 bytes."""
    memory, found = None, []
    for begin in range(0, LENGTH - 1, STEP):
        if change is not None and memory is not None:
            weights = memory.weights.clone()
            change(weights)
            memory = dataclasses.replace(memory, weights=weights)
        part = tokens[:, begin : begin + STEP + 1]
        output = model(part[:, :-1], memory, targets=part[:, 1:])
        memory = output.memory
        found.append(output.losses)
    return torch.cat(found, 1)


def line(what: str, found: Tensor, tokens: Tensor) -> str:
    """By distance, and on spaces from 512 bytes on."""
    means = [found[:, a:b].mean() for a, b in itertools.pairwise(EDGES)]
    spaces = found[:, 512:][tokens[:, 513:] == ord(" ")].mean()
    return f"{what:<40}" + "".join(f"{mean:10.2f}" for mean in (*means, spaces))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=list(SHIPPED))
    torch.set_num_threads(1)
    shown = [f"{a}-{b}" for a, b in itertools.pairwise(EDGES)]
    print(" " * 40 + "".join(f"{each:>10}" for each in (*shown, "spaces")))
    for name in parser.parse_args().runs:
        run = memspan.load(name)
        model = run.model.eval()
        for joined in (False, True):
            tokens = passages(joined=joined)
            found = losses(model, tokens, None)
            print(line(f"{name}, {'joined' if joined else 'lines'}", found, tokens))
        if run.config.architecture != "fast-weights":
            continue
        without = {}
        for layer in range(run.config.model.n_layers):
            for head in range(run.config.model.n_heads):

                def empty(weights: Tensor, layer: int = layer, head: int = head) -> None:
                    weights[:, layer, head] = 0

                without[layer + 1, head + 1] = losses(model, tokens, empty)
        (layer, head), found = min(without.items(), key=lambda pair: float(pair[1].mean()))
        print(line(f"  without head {head} of layer {layer}", found, tokens))


if __name__ == "__main__":
    main()
