"""RWKV-7 in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.RWKV7` computes, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch import sigmoid, tanh
from torch.nn.functional import layer_norm, normalize, relu


def head(r, k, v, decay, a, c, bonus, S):
    """One head: decay each row of S [K, V], take away what c finds, write, read."""
    c = normalize(c, dim=0)
    S = decay[:, None] * S - torch.outer(a * c, c @ S) + torch.outer(k, v)
    return layer_norm(r @ S, v.shape, eps=1e-5 * len(r)), (bonus * r) @ k * v, S


def time_mixing(x, before, states, first, w):
    """Token x [D] beside the one before it; v of the first layer, None in that layer."""
    at = {name: x + (before - x) * share for name, share in w["shift"].items()}
    r = at["r"] @ w["query"]
    k = at["k"] @ w["key"]
    v = at["v"] @ w["value"]
    decay = w["decay_base"] + tanh(at["w"] @ w["decay_down"]) @ w["decay_up"]
    decay = torch.exp(-(torch.e**-0.5) * sigmoid(decay))
    a = sigmoid(w["rate_base"] + at["a"] @ w["rate_down"] @ w["rate_up"])
    if first is None:
        first = v
    else:
        share = sigmoid(w["value_base"] + at["v"] @ w["value_down"] @ w["value_up"])
        v = v + share * (first - v)
    c = k * w["removal"]
    k = k * (1 + (a - 1) * w["replacement"])
    parts = [t.chunk(len(states)) for t in (r, k, v, decay, a, c, w["bonus"])]
    done = [head(*own) for own in zip(*parts, states, strict=True)]
    y, own, states = (list(each) for each in zip(*done, strict=True))
    y = torch.cat(y) * w["norm"] + w["norm_bias"] + torch.cat(own)
    return y * (sigmoid(at["g"] @ w["gate_down"]) @ w["gate_up"]) @ w["output"], states, first


def layer(x, memory, first, w):
    """Time mixing and channel mixing, each after its norm and added to its input."""
    states, before, before_channels = memory
    u = layer_norm(x, x.shape)
    y, states, first = time_mixing(u, before, states, first, w)
    x = x + y
    h = layer_norm(x, x.shape)
    inner = relu((h + (before_channels - h) * w["channel_shift"]) @ w["inner"])
    return x + inner**2 @ w["outer"], (states, u, h), first


def read(text, memory, layers):
    """Read a text [T, D]; a memory has each layer's matrices and two vectors of the token before."""
    outputs = []
    for x in text:
        after = []
        first = None
        for own, w in zip(memory, layers, strict=True):
            x, own, first = layer(x, own, first, w)
            after.append(own)
        memory = after
        outputs.append(layer_norm(x, x.shape))
    return torch.stack(outputs), memory


def new_layer(D=32, rank=4):
    """The weights that a layer begins with: half of a row is left after some 14 tokens."""
    w = {name: matrix(D, D) for name in ["query", "key", "value", "output"]}
    for name in ["decay", "rate", "value", "gate"]:
        w |= {f"{name}_down": matrix(D, rank), f"{name}_up": matrix(rank, D)}
        w |= {f"{name}_base": torch.full([D], -2.5 if name == "decay" else 0.0).requires_grad_()}
    ones = {name: torch.ones(D, requires_grad=True) for name in ["removal", "replacement", "norm"]}
    w |= ones | {"bonus": zeros(D), "norm_bias": zeros(D), "channel_shift": zeros(D)}
    w |= {"shift": {name: zeros(D) for name in "rwkvag"}}
    return w | {"inner": matrix(D, 2 * D), "outer": matrix(2 * D, D)}


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [new_layer() for _ in range(2)]

    def segment(h, memory):
        h, after = read(h, memory, layers)
        return (
            h,
            [([S.detach() for S in each], *(x.detach() for x in xs)) for each, *xs in after],
            0.0,
        )

    # For each layer S [K, V] for each head, and what both mixings saw last.
    learn(segment, layers, empty=[([torch.zeros(16, 16)] * 2, *torch.zeros(2, 32))] * 2)
