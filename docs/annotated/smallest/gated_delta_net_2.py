"""Gated DeltaNet 2 in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.GatedDeltaNet2` computes, as a test checks. What is imported is as in
Gated DeltaNet.
"""

import torch
from gated_delta_net import convolve, read, unit
from learn import learn, matrix, zeros
from torch.nn.functional import rms_norm, softplus


def head(x, S, before, w):
    """One head, one token x [D]: decay each row of S [K, V] by itself, erase, write, read."""
    qkv = torch.cat([x @ w["query"], x @ w["key"], x @ w["value"]])
    qkv, before = convolve(qkv, before, w["taps"])
    K, V = S.shape
    q, k, v = qkv.split([K, K, V])
    k = unit(k)
    step = softplus(x @ w["step_down"] @ w["step_up"] + w["dt_bias"])
    S = torch.exp(-torch.exp(w["A_log"]) * step)[:, None] * S
    old = (torch.sigmoid(x @ w["erase"]) * k) @ S
    S = S + torch.outer(k, torch.sigmoid(x @ w["write"]) * v - old)
    y = rms_norm(unit(q) / K**0.5 @ S, [V], eps=1e-6)
    return y * torch.sigmoid(x @ w["gate_down"] @ w["gate_up"] + w["gate_bias"]), S, before


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with: half of a row is left after some 14 tokens."""
    K = width // n_heads
    names = ["query", "key", "value", "step_down", "gate_down"]
    heads = []
    for _ in range(n_heads):
        w = {name: matrix(width, K) for name in names}
        w |= {"taps": matrix(4, 3 * K).T.detach().requires_grad_()}
        w |= {"erase": zeros(width, K), "write": zeros(width, K)}
        w |= {"step_up": zeros(K, K), "dt_bias": torch.full([K], -3.0, requires_grad=True)}
        w |= {"gate_up": matrix(K, K), "gate_bias": zeros(K), "A_log": zeros()}
        heads.append(w)
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
        return h, [[[part.detach() for part in own] for own in each] for each in after], 0.0

    # For each layer and head S [K, V] and the last three inputs of the convolution.
    learn(segment, layers, empty=[[[torch.zeros(16, 16), torch.zeros(3, 48)]] * 2] * 2)
