"""Gated DeltaNet in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.GatedDeltaNet` computes, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, relu, rms_norm, silu, softplus


def convolve(x, before, taps):
    """A weight for each number of x [C] and of the three inputs before it, `taps` [C, 4]."""
    inputs = torch.cat([before, x[None]])
    return silu((inputs * taps.T).sum(0)), inputs[1:]


def unit(x):
    """x [K] divided by its length."""
    return x * torch.rsqrt(x @ x + 1e-6)


def write(S, k, v, alpha, beta):
    """The gated delta rule: S [K, V] decays, then a share beta of what k reads gives way to v."""
    S = alpha * S
    return S + beta * torch.outer(k, v - k @ S)


def head(x, S, before, w):
    """One head, one token x [D]: decay, write, read."""
    qkv = torch.cat([x @ w["query"], x @ w["key"], x @ w["value"]])  # [2 K + V]
    qkv, before = convolve(qkv, before, w["taps"])
    K, V = S.shape
    q, k, v = qkv.split([K, K, V])
    alpha = torch.exp(-torch.exp(w["A_log"]) * softplus(x @ w["step"] + w["dt_bias"]))  # a number
    S = write(S, unit(k), v, alpha, torch.sigmoid(x @ w["beta"]))
    y = rms_norm(unit(q) / K**0.5 @ S, [V], eps=1e-6)  # [V]
    return y * silu(x @ w["gate"]), S, before


def layer(x, memory, w, head=head):
    """Heads and feed-forward, each after its norm and added to its input."""
    u = layer_norm(x, x.shape)
    done = [head(u, *own, each) for own, each in zip(memory, w["heads"], strict=True)]
    x = x + torch.cat([y for y, *_ in done]) @ w["output"]
    inner = relu(layer_norm(x, x.shape) @ w["inner"] + w["inner_bias"])
    return x + inner @ w["outer"] + w["outer_bias"], [own for _, *own in done]


def read(text, memory, layers, head=head):
    """Read a text [T, D]; a memory has a matrix and three inputs for every layer and head."""
    outputs = []
    for x in text:
        after = []
        for own, w in zip(memory, layers, strict=True):
            x, own = layer(x, own, w, head)
            after.append(own)
        memory = after
        outputs.append(layer_norm(x, x.shape))
    return torch.stack(outputs), memory


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with: half of a matrix is left after some 14 tokens."""
    K = width // n_heads
    names = ["query", "key", "value", "gate"]
    heads = [{name: matrix(width, K) for name in names} for _ in range(n_heads)]
    for head in heads:
        # The convolution passes each token on as it is, until it learns better.
        head |= {"taps": torch.eye(4)[3].repeat(3 * K, 1).requires_grad_()}
        head |= {"step": zeros(width), "beta": zeros(width)}
        head |= {"A_log": zeros(), "dt_bias": torch.tensor(-3.0, requires_grad=True)}
    return {
        "heads": heads,
        "output": matrix(width, width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


def small():
    """A model of one layer: how it reads a segment, its weights, and its empty memory."""
    layers = [new_layer()]

    def segment(h, memory):
        h, after = read(h, memory, layers)
        return h, [[[part.detach() for part in own] for own in each] for each in after], 0.0

    # For each layer and head S [K, V] and the last three inputs of the convolution, [3, 2 K + V].
    return segment, layers, [[[torch.zeros(16, 16), torch.zeros(3, 48)]] * 2]


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(*small())
