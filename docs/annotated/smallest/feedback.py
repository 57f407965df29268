"""A Feedback Transformer in its smallest form: one text, one token after another.

It computes what `memspan.models.Feedback` computes with `normalisation="post"`, as a test checks.
"""

import torch
from learn import learn, matrix, zeros
from torch.nn.functional import layer_norm, relu


def attention(x, past, w):
    """One head: x [D] attends to the memory vectors past [N, D], the newest last."""
    q = x @ w["query"]  # [K]
    keys = past @ w["key"]  # [N, K]
    values = past @ w["value"]  # [N, K]
    scores = q.new_empty(len(past))
    for j in range(len(past)):
        row = len(past) - j - 1
        by_content = (q + w["u"]) @ keys[j]
        by_distance = q @ w["position_keys"][row] + w["position_scores"][row]
        scores[j] = (by_content + by_distance) / len(q) ** 0.5
    return scores.softmax(-1) @ values  # [K]


def layer(x, past, w):
    """Attention and feed-forward, each with its residual sum and its norm."""
    attended = torch.zeros_like(x)
    if len(past):
        heads = torch.cat([attention(x, past, head) for head in w["heads"]])
        attended = heads @ w["output"]
    x = layer_norm(x + attended, x.shape)
    inner = relu(x @ w["inner"] + w["inner_bias"])
    return layer_norm(x + inner @ w["outer"] + w["outer_bias"], x.shape)


def read(embeddings, past, layers, layer_weights, span):
    """Read embeddings [T, D] after the memory vectors past [N, D]."""
    outputs = []
    for x in embeddings:
        states = [x]
        for w in layers:
            states.append(layer(states[-1], past, w))
        memory_vector = layer_weights.softmax(0) @ torch.stack(states)  # [D]
        past = torch.cat([past, memory_vector[None]])[-span:]  # [N, D]
        outputs.append(states[-1])
    return torch.stack(outputs), past


def new_layer(span, width=32, n_heads=2):
    """The weights that a layer begins with."""
    K = width // n_heads
    heads = [{name: matrix(width, K) for name in ("query", "key", "value")} for _ in range(n_heads)]
    for head in heads:
        head |= {"u": zeros(K), "position_keys": matrix(span, K), "position_scores": zeros(span)}
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
    layers = [new_layer(span=16)]
    mixing = zeros(len(layers) + 1)

    def segment(h, past):
        h, past = read(h, past, layers, mixing, span=16)
        return h, past.detach(), 0.0

    return segment, [*layers, mixing], torch.zeros(0, 32)


if __name__ == "__main__":
    torch.manual_seed(0)
    learn(*small())
