"""Trains a smallest version to recall what was written some tokens ago: `python recall.py transformer_xl`.

A token writes a value under a key, or asks for the value last written under one. Sixteen texts are read
side by side: `torch.vmap` makes of a program for one text a program for many.
"""

import sys
from importlib import import_module

import torch
from learn import leaves, matrix
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

N_KEYS = N_VALUES = 8
N_TEXTS = 16
LENGTH = 8
"""Tokens of a segment."""
EDGES = (1, 4, 8, 16, 24, 32, 48, 96)


def write_stream(n_tokens):
    """A text [n_tokens]: keys, values (-1: a question), answers, and how many tokens back each was written."""
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


def recall(version, updates=300, rate=0.01):
    """Train a version, and score it on later tokens of its texts: right answers by distance."""
    segment, layers, empty = version.small()
    width = layers[0]["output"].shape[1]
    tables = [matrix(width, n).T.detach().requires_grad_() for n in (N_KEYS, N_KEYS, N_VALUES)]
    writes, asks, meanings = (table.mul_(2).requires_grad_() for table in map(torch.detach, tables))
    head = matrix(width, N_VALUES)
    optimiser = torch.optim.Adam([writes, asks, meanings, head, *leaves(layers)], rate)
    texts = [write_stream(LENGTH * (updates + 100)) for _ in range(N_TEXTS)]
    keys, values, answers, distances = (torch.stack(part) for part in zip(*texts, strict=True))
    memory = tree_map(lambda x: x.expand(N_TEXTS, *x.shape), empty)
    read = torch.vmap(segment, out_dims=(0, 0, None) if version.__name__ != "compressive" else 0)
    right, asked = torch.zeros(len(EDGES)), torch.zeros(len(EDGES))
    for n in range(updates + 100):
        at = slice(LENGTH * n, LENGTH * (n + 1))
        written = writes[keys[:, at]] + meanings[values[:, at].clamp(min=0)]
        x = torch.where(values[:, at, None] >= 0, written, asks[keys[:, at]])
        with torch.set_grad_enabled(n < updates):
            h, memory, auxiliary = read(x, memory)
        logits = (h @ head).flatten(0, 1)
        if n < updates:
            loss = cross_entropy(logits, answers[:, at].flatten(), ignore_index=-1)
            optimiser.zero_grad()
            (loss + torch.as_tensor(auxiliary).mean()).backward()
            optimiser.step()
            if n % 50 == 49:
                print(f"update {n + 1}: {loss:.2f} nats per answer", flush=True)
            continue
        hits = logits.argmax(-1) == answers[:, at].flatten()
        for i, edge in enumerate(EDGES):
            before = EDGES[i - 1] if i else 0
            far = distances[:, at].flatten()
            here = (far > before) & (far <= edge)
            right[i] += (hits & here).sum()
            asked[i] += here.sum()
    for i, edge in enumerate(EDGES):
        before = EDGES[i - 1] if i else 0
        print(f"written {before + 1} to {edge} tokens ago: {right[i] / asked[i]:.0%} right")


if __name__ == "__main__":
    torch.manual_seed(0)
    recall(import_module(sys.argv[1]))
