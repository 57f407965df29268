"""Trains a smallest version to predict the next letter of a rhyme in which everything repeats."""

import torch
from torch.nn.functional import cross_entropy

PARTS = [
    "the malt that lay in ",
    "the rat that ate ",
    "the cat that killed ",
    "the dog that worried ",
    "the cow with the crumpled horn that tossed ",
]
VERSES = ["".join(reversed(PARTS[:n])) for n in range(len(PARTS) + 1)]
RHYME = "".join(f"this is {verse}the house that jack built. " for verse in VERSES)
LETTERS = sorted({*RHYME})


def matrix(n_inputs, n_outputs):
    """Weights to train, as large as leaves the size of what they multiply as it is."""
    return (torch.randn(n_inputs, n_outputs) / n_inputs**0.5).requires_grad_()


def zeros(*shape):
    """Weights to train that begin at zero."""
    return torch.zeros(shape, requires_grad=True)


def leaves(weights):
    """All tensors in nested lists and dicts."""
    if isinstance(weights, torch.Tensor):
        return [weights]
    parts = weights.values() if isinstance(weights, dict) else weights
    return [tensor for part in parts for tensor in leaves(part)]


def segments(embedding, read, empty, length=8, carry=True):
    """Read the rhyme: for each segment nats per letter and the auxiliary loss."""
    letters = torch.tensor([LETTERS.index(letter) for letter in RHYME])
    memory = empty
    for tokens, targets in zip(letters[:-1].split(length), letters[1:].split(length), strict=True):
        h, memory, auxiliary = read(embedding[tokens], memory if carry else empty)
        yield cross_entropy(h @ embedding.T, targets), auxiliary


def learn(read, layers, empty, rounds=10, rate=0.01):
    """Train `layers` of `read`, which maps vectors [T, D] and a memory to the same and a loss:
    with its memory carried, and once more from the same start with memory emptied at every
    segment."""
    torch.set_num_threads(1)  # For products this small, more threads only wait for each other.
    embedding = matrix(len(LETTERS), layers[0]["output"].shape[1])
    weights = [embedding, *leaves(layers)]
    start = [w.detach().clone() for w in weights]
    for carry, how in [(True, "carried"), (False, "emptied at every segment")]:
        print(f"memory {how}")
        for w, first in zip(weights, start, strict=True):
            w.data.copy_(first)
        optimiser = torch.optim.Adam(weights, rate)
        for n in range(rounds):
            optimiser.param_groups[0]["lr"] = rate * (1 - n / rounds)
            losses = []
            for loss, auxiliary in segments(embedding, read, empty, carry=carry):
                optimiser.zero_grad()
                (loss + auxiliary).backward()
                optimiser.step()
                losses.append(loss.item())
            print(f"round {n + 1}: {sum(losses) / len(losses):.2f} nats per letter")
        with torch.no_grad():
            losses = [loss.item() for loss, _ in segments(embedding, read, empty, carry=carry)]
        print(f"afterwards: {sum(losses) / len(losses):.2f}")
