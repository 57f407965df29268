"""DeltaProduct in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.DeltaProduct` computes, as a test checks. What is imported is as in
Gated DeltaNet: here a token writes several times before it reads.
"""

import torch
from gated_delta_net import convolve, read, unit, write
from learn import learn, matrix, zeros
from torch.nn.functional import rms_norm, silu, softplus


def head(x, S, before, w):
    """One head, one token x [D]: decay, write under each of the n keys in turn, read."""
    qkv = torch.cat([x @ w["query"], x @ w["key"], x @ w["value"]])
    qkv, before = convolve(qkv, before, w["taps"])
    K, V = S.shape
    betas = 2 * torch.sigmoid(x @ w["beta"])
    n = len(betas)
    q, keys, values = qkv.split([K, n * K, n * V])
    S = torch.exp(-torch.exp(w["A_log"]) * softplus(x @ w["step"] + w["dt_bias"])) * S
    for k, v, beta in zip(keys.view(n, K), values.view(n, V), betas, strict=True):
        S = write(S, unit(k), v, 1, beta)
    y = rms_norm(unit(q) / K**0.5 @ S, [V], eps=1e-6)
    return y * silu(x @ w["gate"]), S, before


def new_layer(width=32, n_heads=2, n=2):
    """The weights that a layer begins with: half of a matrix is left after some 14 tokens."""
    K = width // n_heads
    sizes = {"query": K, "key": n * K, "value": n * K, "gate": K}
    heads = []
    for _ in range(n_heads):
        w = {name: matrix(width, size) for name, size in sizes.items()}
        w |= {"taps": matrix(4, (1 + 2 * n) * K).T.detach().requires_grad_()}
        w |= {"step": zeros(width), "beta": zeros(width, n)}
        w |= {"A_log": zeros(), "dt_bias": torch.tensor(-3.0, requires_grad=True)}
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
    learn(segment, layers, empty=[[[torch.zeros(16, 16), torch.zeros(3, 80)]] * 2] * 2)
