"""Relative attention of one head, forward and backward, as the fused implementation computes it.

It computes what `memspan.ops.relative` computes, and its gradients, as a test checks.
"""

import torch


def shift(x):
    """[T, S+1], whose column c is the distance S - c, as [T, S], whose column is a key."""
    n_queries = len(x)
    n_keys = x.shape[1] - 1
    return x.view(-1)[n_queries:].view(n_queries, n_keys)


def forward(q, k, v, r, u, w):
    """q [T, K], k and v [S, K], r [S, K] with the nearest distance first, the biases u and w [K]."""
    n_queries = len(q)
    n_keys = len(k)
    far_first = torch.cat([torch.zeros_like(r[:1]), r.flip(0)])
    q = q + u
    x = q @ far_first.T + far_first @ (w - u)
    future = torch.ones(n_queries, n_keys).triu(n_keys - n_queries + 1).bool()
    a = (q @ k.T + shift(x)) / q.shape[1] ** 0.5
    weights = a.masked_fill(future, -torch.inf).softmax(-1)
    output = weights @ v
    return output, (q, k, v, far_first, w - u, weights, output)


def backward(d_output, saved):
    """The gradients of q, k, v, r, u and w from that of the output."""
    q, k, v, far_first, w_minus_u, weights, output = saved
    d_v = weights.T @ d_output
    d_weights = d_output @ v.T
    row = (d_output * output).sum(1, keepdim=True)
    d_a = weights * (d_weights - row) / q.shape[1] ** 0.5
    d_x = torch.zeros(len(q), len(k) + 1)
    shift(d_x)[:] = d_a
    d_q = d_a @ k + d_x @ far_first
    d_k = d_a.T @ q
    d_scores = d_x.sum(0)
    d_far_first = d_x.T @ q + d_scores[:, None] * w_minus_u
    d_w = d_scores @ far_first
    return d_q, d_k, d_v, d_far_first[1:].flip(0), d_q.sum(0) - d_w, d_w
