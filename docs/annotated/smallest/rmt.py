"""A Recurrent Memory Transformer in its smallest form: one text, one block after another.

It computes what `memspan.models.RMT` computes around a transformer, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, relu


def turned(x):
    """Rotary positions: each pair (x_i, x_{i + K/2}) of x [T, K] turned by its position's angle."""
    T, K = x.shape
    angle = torch.arange(T)[:, None] / 10000 ** (torch.arange(0, K, 2) / K)
    a, b = x.chunk(2, 1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)


def attention(u, w):
    """One head of causal attention, u [T, D]."""
    q = turned(u @ w["query"])
    k = turned(u @ w["key"])
    scores = q @ k.T / k.shape[1] ** 0.5
    future = torch.ones_like(scores).triu(1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ (u @ w["value"])


def transformer(h, layers):
    """The backbone, h [T, D]; of the text before it knows nothing."""
    for w in layers:
        u = layer_norm(h, h.shape[1:])
        h = h + torch.cat([attention(u, head) for head in w["heads"]], 1) @ w["output"]
        u = layer_norm(h, h.shape[1:])
        h = h + relu(u @ w["inner"] + w["inner_bias"]) @ w["outer"] + w["outer_bias"]
    return layer_norm(h, h.shape[1:])


def read(text, memory, layers, first, block_length):
    """Read a text [T, D], however it is cut.

    A memory is the memory tokens [m, D], at first the learned ones, and the block's inputs so far.
    """
    tokens, block = memory
    tokens = first if tokens is None else tokens
    outputs = []
    while len(text):
        more, text = text.tensor_split([block_length - len(block)])
        block = torch.cat([block, more])
        h = transformer(torch.cat([tokens, block, tokens]), layers)
        _, y, written = h.split([len(tokens), len(block), len(tokens)])
        outputs.append(y[len(y) - len(more) :])
        if len(block) == block_length:
            tokens = written
            block = block[:0]
    return torch.cat(outputs), (tokens, block)


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with."""
    K = width // n_heads
    names = ["query", "key", "value"]
    return {
        "heads": [{name: matrix(width, K) for name in names} for _ in range(n_heads)],
        "output": matrix(width, width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [new_layer()]
    first = matrix(2, 32)

    def segment(h, memory):
        h, (tokens, block) = read(h, memory, layers, first, block_length=8)
        return h, (tokens.detach(), block.detach()), 0.0

    learn(segment, [*layers, {"tokens": first}], empty=(None, torch.zeros(0, 32)))
