"""Infini-attention in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.Infini` computes, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import elu, layer_norm, relu


def turned(x, positions):
    """Rotary positions: each pair (x_i, x_{i + K/2}) of x [T, K] turned by its position's angle."""
    K = x.shape[1]
    angle = positions[:, None] / 10000 ** (torch.arange(0, K, 2) / K)
    a, b = x.chunk(2, 1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)


def recall(x, M, z):
    """Read all blocks before with queries or keys x [T, K]: matrix M [K, K], sum of keys z [K]."""
    features = elu(x) + 1
    return features @ M / (features @ z)[:, None] if z.any() else torch.zeros_like(x)


def head(x, memory, w, block_length, delta):
    """One head, one token x [D]; its memory is M, z, and keys and values of the block so far."""
    M, z, keys, values = memory
    q = (x @ w["query"])[None]
    keys = torch.cat([keys, (x @ w["key"])[None]])
    values = torch.cat([values, (x @ w["value"])[None]])
    positions = torch.arange(len(keys))
    scores = turned(q, positions[-1:]) @ turned(keys, positions).T / keys.shape[1] ** 0.5
    share = torch.sigmoid(w["gate"])
    y = share * recall(q, M, z) + (1 - share) * scores.softmax(-1) @ values
    if len(keys) == block_length:
        features = elu(keys) + 1
        new = values - recall(keys, M, z) if delta else values
        M = M + features.T @ new
        z = z + features.sum(0)
        keys = keys[:0]
        values = values[:0]
    return y[0], (M, z, keys, values)


def layer(x, memory, w, block_length, delta):
    """Heads and feed-forward, each after its norm and added to its input."""
    u = layer_norm(x, x.shape)
    heads = zip(memory, w["heads"], strict=True)
    done = [head(u, own, each, block_length, delta) for own, each in heads]
    x = x + torch.cat([y for y, _ in done]) @ w["output"]
    inner = relu(layer_norm(x, x.shape) @ w["inner"] + w["inner_bias"])
    return x + inner @ w["outer"] + w["outer_bias"], [own for _, own in done]


def read(text, memory, layers, block_length, delta=False):
    """Read a text [T, D] on from a memory for every layer and head, however it is cut."""
    outputs = []
    for x in text:
        after = []
        for own, w in zip(memory, layers, strict=True):
            x, own = layer(x, own, w, block_length, delta)
            after.append(own)
        memory = after
        outputs.append(layer_norm(x, x.shape))
    return torch.stack(outputs), memory


def empty(K):
    """The memory of a head of width K before the first token."""
    return torch.zeros(K, K), torch.zeros(K), torch.zeros(0, K), torch.zeros(0, K)


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with."""
    K = width // n_heads
    names = ["query", "key", "value"]
    heads = [{name: matrix(width, K) for name in names} for _ in range(n_heads)]
    return {
        "heads": [head | {"gate": zeros()} for head in heads],
        "output": matrix(width, width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [new_layer()]

    def segment(h, memory):
        h, after = read(h, memory, layers, block_length=6)
        return h, [[tuple(t.detach() for t in own) for own in each] for each in after], 0.0

    learn(segment, layers, empty=[[empty(16)] * 2])
