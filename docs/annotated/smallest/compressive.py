"""A Compressive Transformer in its smallest form: one text, and the smallest Transformer-XL's layer.

It computes what `memspan.models.Compressive` computes with `normalisation="post"`, as a test checks.
"""

import math

import torch
from learn import learn, matrix, zeros
from transformer_xl import layer, new_layer, newest


def compress(old, w):
    """f_c: each run of c slots becomes one, old [n*c, D] -> [n, D]."""
    rate = len(w["f"])
    runs = [old[first : first + rate] for first in range(0, len(old), rate)]
    return torch.stack([sum(run[p] @ w["f"][p] for p in range(rate)) + w["f_bias"] for run in runs])


def by_content(h, slots, head):
    """One head's attention without positions, mask, or a gradient for its weights."""
    q = h @ head["query"].detach()  # [T, K]
    k = slots @ head["key"].detach()  # [slots, K]
    v = slots @ head["value"].detach()  # [slots, K]
    return (q @ k.T / q.shape[1] ** 0.5).softmax(-1) @ v


def attention_loss(h, old, new, w):
    """Does the segment read the same from the new slots as from the old?"""
    errors = [by_content(h, old, head) - by_content(h, new, head) for head in w["heads"]]
    return torch.stack(errors).square().mean()


def auto_encoding_loss(h, old, new, w):
    """Can a decoder g make the old slots from the new? What h asks for plays no part."""
    decoded = [slot @ g + w["g_bias"] for slot in new for g in w["g"]]
    return (torch.stack(decoded) - old).square().mean()


def read(h, memories, layers, memory_length, compressed_length, loss_of=attention_loss):
    """Read a segment h [T, D]: the output, both memories of each layer, the auxiliary loss."""
    after = []
    loss = torch.zeros(())
    for (compressed, memory), w in zip(memories, layers, strict=True):
        output = layer(h, torch.cat([compressed, memory]), w)
        memory = torch.cat([memory, h])  # [M + T, D] once it is full
        rate = len(w["f"])
        n_old = rate * math.ceil(max(0, len(memory) - memory_length) / rate)
        if n_old and compressed_length:
            old = memory[:n_old].detach()  # [n c, D]
            new = compress(old, w)  # [n, D]
            loss = loss + loss_of(h.detach(), old, new, w)
            compressed = newest(torch.cat([compressed, new.detach()]), compressed_length)
        after.append((compressed, memory[n_old:]))
        h = output
    return h, after, loss


def small():
    """A model of one layer: how it reads a segment, its weights, and its empty memory."""
    layers = [new_layer() | {"f": [matrix(32, 32) for _ in range(3)], "f_bias": zeros(32)}]

    def segment(h, memories):
        h, after, loss = read(h, memories, layers, memory_length=9, compressed_length=5)
        return h, [(compressed, memory.detach()) for compressed, memory in after], loss

    return segment, layers, [(torch.zeros(0, 32), torch.zeros(0, 32))]


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(*small())
