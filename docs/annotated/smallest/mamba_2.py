"""Mamba-2 in its smallest form: one text, token by token, one head after another.

It computes what `memspan.models.Mamba2` computes, as a test checks. C, B and x are what others call
query, key and value; the state S [N, P] only decays and is added to.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, rms_norm, silu, softplus


def head(u, x, B, C, S, w):
    """One head, one token u [D]: decay, write, read; x [P] also passes by the state."""
    step = softplus(u @ w["step"] + w["dt_bias"])
    S = torch.exp(-step * torch.exp(w["A_log"])) * S + step * torch.outer(B, x)
    return C @ S + w["D"] * x, S


def layer(x, memory, w):
    """Convolution, heads and gate after a norm, added to their input."""
    u = layer_norm(x, x.shape)
    states, before = memory
    N, P = states[0].shape
    inputs = torch.cat([before, (u @ w["CBx"])[None]])
    CBx = silu((inputs * w["taps"].T).sum(0) + w["taps_bias"])
    C, B, *xs = CBx.split([N, N] + [P] * len(states))
    done = [head(u, x, B, C, *own) for x, *own in zip(xs, states, w["heads"], strict=True)]
    y = torch.cat([y for y, _ in done]) * silu(u @ w["gate"])
    y = rms_norm(y, y.shape, eps=1e-6) * w["norm"]
    return x + y @ w["output"], ([S for _, S in done], inputs[1:])


def read(text, memory, layers):
    """Read a text [T, D]; a memory has a state for every head and three inputs for every layer."""
    outputs = []
    for x in text:
        after = []
        for own, w in zip(memory, layers, strict=True):
            x, own = layer(x, own, w)
            after.append(own)
        memory = after
        outputs.append(layer_norm(x, x.shape))
    return torch.stack(outputs), memory


def new_layer(width=32, n_heads=2, N=16):
    """The weights that a layer begins with: half of a state is left after some 14 tokens."""
    inner = 2 * width
    channels = 2 * N + inner
    heads = []
    for _ in range(n_heads):
        w = {"step": zeros(width), "dt_bias": torch.tensor(-3.0, requires_grad=True)}
        heads.append(w | {"A_log": zeros(), "D": torch.ones((), requires_grad=True)})
    return {
        "heads": heads,
        "CBx": matrix(width, channels),
        "taps": matrix(4, channels).T.detach().requires_grad_(),
        "taps_bias": zeros(channels),
        "gate": matrix(width, inner),
        "norm": torch.ones(inner, requires_grad=True),
        "output": matrix(inner, width),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [new_layer() for _ in range(2)]

    def segment(h, memory):
        h, after = read(h, memory, layers)
        return h, [([S.detach() for S in own], inputs.detach()) for own, inputs in after], 0.0

    # For each layer a state [N, P] for each head, and the last three inputs of the convolution.
    learn(segment, layers, empty=[([torch.zeros(16, 32)] * 2, torch.zeros(3, 96))] * 2)
