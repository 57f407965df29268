"""Trains a smallest version to recall what was written some tokens ago: `remember.py transformer_xl`.

A token writes a value under a key, or asks for the value last written under one. Sixteen texts are read
side by side: `torch.vmap` makes of a program for one text a program for many.
"""

import sys
from importlib import import_module
from itertools import pairwise

import torch
from learn import leaves, matrix
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

N_KEYS = N_VALUES = 8
N_TEXTS = 16
LENGTH = 8
"""Tokens of a segment."""
N_SCORED = 100
"""Segments that are scored after training."""
EDGES = (0, 1, 4, 8, 16, 24, 32, 48, 96)


def write_stream(n_tokens):
    """A text [n_tokens]: keys, values (-1: a question), answers, and how long ago each was written."""
    keys = torch.randint(N_KEYS, (n_tokens,))
    values = torch.where(torch.rand(n_tokens) < 0.5, torch.randint(N_VALUES, (n_tokens,)), -1)
    answers = torch.full((n_tokens,), -1)
    distances = torch.zeros(n_tokens, dtype=torch.long)
    last = {}
    for t, (key, value) in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
        if value >= 0:
            last[key] = t
        elif key in last:
            answers[t] = values[last[key]]
            distances[t] = t - last[key]
    return keys, values, answers, distances


def recall(version, updates=400, rate=0.01):
    """Train a version, then score it on what follows in its texts: right answers by distance."""
    torch.set_num_threads(1)
    segment, layers, empty = version.small()
    width = layers[0]["output"].shape[1]
    tables = [2 * matrix(width, n).T for n in (N_KEYS, N_KEYS, N_VALUES)]
    writes, asks, meanings = (table.detach().requires_grad_() for table in tables)
    head = matrix(width, N_VALUES)
    optimiser = torch.optim.Adam([writes, asks, meanings, head, *leaves(layers)], rate)
    texts = [write_stream(LENGTH * (updates + N_SCORED)) for _ in range(N_TEXTS)]
    keys, values, answers, distances = (torch.stack(part) for part in zip(*texts, strict=True))
    memory = tree_map(lambda x: x.expand(N_TEXTS, *x.shape), empty)

    @torch.vmap
    def read(x, memory):
        h, memory, auxiliary = segment(x, memory)
        return h, memory, torch.as_tensor(auxiliary)

    scores = []
    for n in range(updates + N_SCORED):
        at = slice(LENGTH * n, LENGTH * (n + 1))
        written = writes[keys[:, at]] + meanings[values[:, at].clamp(min=0)]
        x = torch.where(values[:, at, None] >= 0, written, asks[keys[:, at]])
        with torch.set_grad_enabled(n < updates):
            h, memory, auxiliary = read(x, memory)
            logits = h @ head  # [texts, T, values]
        if n >= updates:
            scores.append((logits.argmax(-1) == answers[:, at], distances[:, at]))
            continue
        loss = cross_entropy(logits.flatten(0, 1), answers[:, at].flatten(), ignore_index=-1)
        optimiser.zero_grad()
        (loss + auxiliary.mean()).backward()
        optimiser.step()
        if n % 50 == 49:
            print(f"update {n + 1}: {loss:.2f} nats per answer", flush=True)
    right, back = (torch.cat(part) for part in zip(*scores, strict=True))
    for before, edge in pairwise(EDGES):
        share = right[(back > before) & (back <= edge)].float().mean()
        print(f"written {before + 1} to {edge} tokens ago: {share:.0%} right")


if __name__ == "__main__":
    torch.manual_seed(0)
    recall(import_module(sys.argv[1]))
