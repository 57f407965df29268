"""Feedback's recurrence, and its backward by hand: one text, one head, no biases.

It computes what `memspan.ops.feedback` computes, as a test checks. The weights are those of
`FoldedWeights`: `query [L, D, K]`, `position_keys [L, S, K]` and `position_scores [L, S]`,
farthest first, `output [L, K, D]`, `inner [L, D, F]`, `outer [L, F, D]`, `memory [D, 2 K]`,
`mix [L + 1]`.
"""

import torch
from torch.nn.functional import layer_norm


def norm(x):
    return layer_norm(x, x.shape)


def back_through_norm(g, x):
    """The gradient of x, when that of norm(x) is g."""
    z = norm(x)
    rstd = (x.var(correction=0) + 1e-5).rsqrt()
    return rstd * (g - g.mean() - z * (g * z).mean())


def forward(x, w):
    """Read x [T, D]: the outputs, the memory vectors, and what backward needs."""
    n_layers, span = w["position_scores"].shape
    kv = x.new_zeros(0, w["memory"].shape[1])
    steps = []
    for h in x:
        k, v = kv[-span:].chunk(2, 1)
        states = [h]
        layers = []
        for n in range(n_layers):
            q = norm(h) @ w["query"][n]
            r = w["position_keys"][n, span - len(k) :]
            p = (k @ q + r @ q + w["position_scores"][n, span - len(k) :]).softmax(0)
            middle = h + p @ v @ w["output"][n]
            inner = (norm(middle) @ w["inner"][n]).relu()
            layers.append((h, k, v, q, r, p, middle, inner))
            h = middle + inner @ w["outer"][n]
            states.append(h)
        m = w["mix"] @ torch.stack(states)
        kv = torch.cat([kv, (norm(m) @ w["memory"])[None]])
        steps.append((torch.stack(states), m, layers))
    return torch.stack([s[-1] for s, _, _ in steps]), torch.stack([m for _, m, _ in steps]), steps


def backward(d_outputs, d_vectors, w, steps):
    """The gradients of x and of the weights, given those of both results."""
    d = {name: torch.zeros_like(w[name]) for name in w}
    d_x = torch.zeros_like(d_outputs)
    span = w["position_scores"].shape[1]
    d_kv = d_outputs.new_zeros(len(steps), w["memory"].shape[1])
    for t in reversed(range(len(steps))):
        states, m, layers = steps[t]
        dm = d_vectors[t] + back_through_norm(w["memory"] @ d_kv[t], m)
        d["memory"] += norm(m).outer(d_kv[t])
        d["mix"] += states @ dm
        g = d_outputs[t] + w["mix"][-1] * dm
        for n, (h, k, v, q, r, p, middle, inner) in reversed([*enumerate(layers)]):
            da = (inner > 0) * (w["outer"][n] @ g)
            d["outer"][n] += inner.outer(g)
            d["inner"][n] += norm(middle).outer(da)
            g = g + back_through_norm(w["inner"][n] @ da, middle)
            do = w["output"][n] @ g
            d["output"][n] += (p @ v).outer(g)
            dp = v @ do
            ds = p * (dp - p @ dp)
            dq = ds @ k + ds @ r
            d["query"][n] += norm(h).outer(dq)
            d["position_keys"][n, span - len(k) :] += ds.outer(q)
            d["position_scores"][n, span - len(k) :] += ds
            d_kv[t - len(k) : t] += torch.cat([ds.outer(q), p.outer(do)], 1)
            g = g + back_through_norm(w["query"][n] @ dq, h) + w["mix"][n] * dm
        d_x[t] = g
    return d_x, d
