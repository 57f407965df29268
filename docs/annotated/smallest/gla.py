"""Gated linear attention in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.GLA` computes, as a test checks. What is imported is as in Gated
DeltaNet; nothing is convolved, and so nothing is carried but the matrices.
"""

import torch
from gated_delta_net import read
from learn import learn, matrix, zeros
from torch.nn.functional import logsigmoid, rms_norm, silu


def head(x, S, w):
    """One head, one token x [D]: decay each row of S [K, V] by itself, add, read."""
    q, k, v = (x @ w[name] for name in ["query", "key", "value"])
    K, V = S.shape
    alpha = torch.exp(logsigmoid(x @ w["decay_down"] @ w["decay_up"] + w["decay_bias"]) / 16)
    S = alpha[:, None] * S + torch.outer(k, v)
    y = rms_norm(q / K**0.5 @ S, [V], eps=1e-6)
    return y * silu(x @ w["gate"]), S


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with: half of a row is left after some 16 tokens."""
    V = width // n_heads
    sizes = {"query": V // 2, "key": V // 2, "value": V, "gate": V, "decay_down": 4}
    heads = []
    for _ in range(n_heads):
        w = {name: matrix(width, size) for name, size in sizes.items()}
        heads.append(w | {"decay_up": matrix(4, V // 2), "decay_bias": zeros(V // 2)})
    return {
        "heads": heads,
        "output": matrix(width, width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [new_layer() for _ in range(2)]

    def segment(h, memory):
        h, after = read(h, memory, layers, head)
        return h, [[[S.detach()] for (S,) in each] for each in after], 0.0

    # For each layer and head S [K, V].
    learn(segment, layers, empty=[[[torch.zeros(8, 16)]] * 2] * 2)
