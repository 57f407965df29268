"""A Fast Weights transformer in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.FastWeights` computes with `norm="post"`, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, relu


def features(x):
    """phi'(x) of a key or query x [K]: DPFP with nu = 1, [2 K] numbers that sum to one."""
    r = relu(torch.cat([x, -x]))  # [2 K]
    phi = r * r.roll(1)
    return phi / (phi.sum() + 1e-6)


def write(W, k, v, beta):
    """The delta rule: of what W [F, V] holds under k, a share beta gives way to v."""
    old = k @ W  # [V]
    return W + beta * torch.outer(k, v - old)


def attention(x, W, w):
    """One head, one token x [D]: write, then read."""
    q = features(x @ w["query"])  # [F]
    k = features(x @ w["key"])  # [F]
    W = write(W, k, x @ w["value"], torch.sigmoid(x @ w["beta"]))
    return q @ W, W


def layer(x, matrices, w):
    """Attention and feed-forward, each with its residual sum and its norm."""
    heads = [attention(x, W, head) for W, head in zip(matrices, w["heads"], strict=True)]
    y = torch.cat([y for y, _ in heads])  # [D]
    x = layer_norm(x + y @ w["output"] + w["output_bias"], x.shape)
    inner = relu(x @ w["inner"] + w["inner_bias"])
    x = layer_norm(x + inner @ w["outer"] + w["outer_bias"], x.shape)
    return x, [W for _, W in heads]


def read(text, memory, layers):
    """Read a text [T, D]; a memory has one matrix for every layer and head."""
    outputs = []
    for x in text:
        after = []
        for matrices, w in zip(memory, layers, strict=True):
            x, matrices = layer(x, matrices, w)
            after.append(matrices)
        memory = after
        outputs.append(x)
    return torch.stack(outputs), memory


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with."""
    columns = {name: width // n_heads for name in ("query", "key", "value")}
    heads = [{name: matrix(width, n) for name, n in columns.items()} for _ in range(n_heads)]
    return {
        "heads": [head | {"beta": zeros(width)} for head in heads],
        "output": matrix(width, width),
        "output_bias": zeros(width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


def small(n_layers=1):
    """A model: how it reads a segment, its weights, and its empty memory."""
    layers = [new_layer() for _ in range(n_layers)]

    def segment(h, memory):
        h, after = read(h, memory, layers)
        return h, [[W.detach() for W in matrices] for matrices in after], 0.0

    # [2 K, K] for each layer and head: DPFP doubles a key's width.
    return segment, layers, [[torch.zeros(32, 16)] * 2] * n_layers


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(*small(n_layers=2), rounds=20, rate=0.003)
