"""The delta rule by chunks, in its smallest form: one head, q and k [T, F], v [T, V], beta [T, 1].

It computes what `memspan.ops.fast_weights.rules.delta_rule` computes token by token, as a test checks.
"""

import torch


def inverse(k, beta):
    """R = (I + tril(K K^T, -1) diag(beta))^-1 [G, G], row by row."""
    rows = []
    for t in range(len(k)):
        row = torch.eye(len(k))[t]
        for j in range(t):
            row = row - (k[t] @ k[j]) * beta[j] * rows[j]
        rows.append(row)
    return torch.stack(rows)


def chunk(q, k, v, beta, S):
    """Read a chunk of G tokens from the memory S [F, V]: outputs, the next memory, errors."""
    z = inverse(k, beta) @ (v - k @ S)
    u = beta * z
    return q @ S + (q @ k.T).tril() @ u, S + k.T @ u, z


def chunk_backward(q, k, beta, S, z, d_y, d_S):
    """Gradients of q, k, v, beta and S, from those of the outputs and of the next memory."""
    u = beta * z
    d_u = (q @ k.T).tril().T @ d_y + k @ d_S
    d_v = inverse(k, beta).T @ (beta * d_u)
    P = (d_y @ u.T).tril()
    C = (d_v @ u.T).tril(-1)
    d_q = d_y @ S.T + P @ k
    d_k = P.T @ q + u @ d_S.T - d_v @ S.T - (C + C.T) @ k
    d_beta = (z * (d_u - (k @ k.T).tril(-1).T @ d_v)).sum(-1, keepdim=True)
    return d_q, d_k, d_v, d_beta, d_S + q.T @ d_y - k.T @ d_v


def read(q, k, v, beta, S, size):
    """All tokens, in chunks of `size`; the last one may be shorter."""
    outputs = []
    for part in zip(*(x.split(size) for x in (q, k, v, beta)), strict=True):
        y, S, _ = chunk(*part, S)
        outputs.append(y)
    return torch.cat(outputs), S
