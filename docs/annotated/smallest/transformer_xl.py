"""A Transformer-XL in its smallest form: one text, and loops where the paper has sums.

It computes what `memspan.models.TransformerXL` computes with `normalisation="post"`, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, relu


def sinusoids(distance, width):
    """R_d of each distance, as in Vaswani et al. 2017, with all sines before all cosines."""
    angle = distance[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angle.sin(), angle.cos()], -1)  # [distances, D]


def attention(h, memory, w):
    """One head: h [T, D] is the segment, memory [M, D] what this layer read before it."""
    n_tokens = len(h)
    n_slots = len(memory)
    context = torch.cat([memory.detach(), h])  # [M + T, D]
    q = h @ w["query"]  # [T, K]
    k = context @ w["key"]  # [M + T, K]
    v = context @ w["value"]  # [M + T, K]
    r = sinusoids(torch.arange(n_slots + n_tokens), h.shape[1]) @ w["position"]
    scores = q.new_full((n_tokens, n_slots + n_tokens), -torch.inf)
    for i in range(n_tokens):
        for j in range(n_slots + i + 1):
            by_content = (q[i] + w["u"]) @ k[j]
            by_distance = (q[i] + w["v"]) @ r[n_slots + i - j]
            scores[i, j] = (by_content + by_distance) / q.shape[1] ** 0.5
    return scores.softmax(-1) @ v  # [T, K]


def layer(h, memory, w):
    """Attention and feed-forward, each with its residual sum and its norm."""
    heads = torch.cat([attention(h, memory, head) for head in w["heads"]], -1)  # [T, D]
    h = layer_norm(h + heads @ w["output"], h.shape[1:])
    inner = relu(h @ w["inner"] + w["inner_bias"])
    return layer_norm(h + inner @ w["outer"] + w["outer_bias"], h.shape[1:])


def read(h, memories, layers, memory_length):
    """Read a segment h [T, D] with one memory per layer, and return the memories after it."""
    after = []
    for memory, w in zip(memories, layers, strict=True):
        after.append(newest(torch.cat([memory, h]), memory_length))
        h = layer(h, memory, w)
    return h, after


def newest(vectors, count):
    """The last `count` of them, or all. (`vectors[-count:]` would be all where `count` is 0.)"""
    return vectors[max(0, len(vectors) - count) :]


def new_layer(width=32, n_heads=2):
    """The weights that a layer begins with."""
    K = width // n_heads
    names = ["query", "key", "value", "position"]
    heads = [{name: matrix(width, K) for name in names} for _ in range(n_heads)]
    return {
        "heads": [head | {"u": zeros(K), "v": zeros(K)} for head in heads],
        "output": matrix(width, width),
        "inner": matrix(width, 2 * width),
        "inner_bias": zeros(2 * width),
        "outer": matrix(2 * width, width),
        "outer_bias": zeros(width),
    }


def small():
    """A model of one layer: how it reads a segment, its weights, and its empty memory."""
    layers = [new_layer()]

    def segment(h, memories):
        h, after = read(h, memories, layers, memory_length=16)
        return h, [memory.detach() for memory in after], 0.0

    return segment, layers, [torch.zeros(0, 32)]


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(*small())
