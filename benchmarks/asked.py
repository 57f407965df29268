"""Record the answers of the model in the page of the documentation: docs/browser/asked.json.

    python benchmarks/asked.py

For each text: the logits after it, and for each of its sentences how much of what the last word read
from memory came from it. docs/browser compares the page's JavaScript with them, tests/docs the model.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

import memspan
import timing
from figures import ASKED, DOCS
from inside import gated_delta_net, rule_calls
from memspan.lab.data.recall import NAMES, PLACES, recall_text

RUN = "recall-gated-delta-net"
PATH = DOCS / "browser" / "asked.json"
MOST = 40
"""Sentences that the page reads at most, as in docs/docsite/style/asked.js."""


def stories() -> list[dict[str, str]]:
    """Texts and who is asked for: one that tells nothing, one with overwritten facts, one with words
    that the model does not know, one with questions in it, and the longest."""
    draw = random.Random(0)
    longest = [f"{draw.choice(NAMES)} is in {draw.choice(PLACES)}." for _ in range(MOST)]
    asked = longest[0].split()[0]
    again = "Tom is in Rome. Tom is in Pisa. Ann is in Rome. Tom is in Milan. Tom is in Genoa."
    return [
        {"story": " ".join(ASKED["story"].split()), "asked": "Kate"},
        {"story": "It rains.", "asked": "Zoe"},
        {"story": again, "asked": "Tom"},
        {"story": "Kate is in Paris. Hamlet is in Padua. Bob is in Siena.", "asked": "Kate"},
        {"story": " ".join(recall_text(30, 5).split()), "asked": "Leo"},
        {"story": " ".join(longest), "asked": asked},
    ]


@torch.no_grad()
def answered(story: str, asked: str) -> dict[str, Any]:
    """Read a text and a question."""
    run = memspan.load(RUN)
    text = f"{story} Where is {asked}?"
    tokens = torch.tensor([[int(i) for i in run.tokenizer.encode(text.encode())]])
    _, (call,) = rule_calls(gated_delta_net, run.model, tokens)
    words = text.split()
    ends = [n + 1 for n, word in enumerate(words) if word[-1] in ".?"]
    (layer,) = run.model.backbone.layers
    mixer = layer.mixer
    x = run.model.embedding(tokens)
    gate = F.silu(mixer.output_gate(layer.mixer_norm(x)))[0, -1]
    q, k, v, beta, memory = call.args
    read = {"log_decay": call.kwargs["log_decay"], "implementation": "reference"}

    def last(values: torch.Tensor) -> torch.Tensor:
        """Read by the last word, with these values in place of those of all words, ``[H, V]``."""
        return gated_delta_net.delta_rule(q, k, values, beta, memory, **read)[0][0, :, -1]

    whole = last(v)
    norm = (whole.square().mean(-1, keepdim=True) + mixer.norm.eps).rsqrt() * mixer.norm.weight
    y = mixer.output((whole * norm).flatten() * gate)
    shares = []
    for start, end in pairwise([0, *ends]):
        own = torch.zeros_like(v)
        own[:, :, start:end] = v[:, :, start:end]
        part = mixer.output((last(own) * norm).flatten() * gate)
        shares.append((part @ y / (y @ y)).item())
    logits = run.model(tokens).logits[0, -1].tolist()
    return {
        "story": story,
        "asked": asked,
        "words": [run.tokenizer.tokens()[i] for i in tokens[0].tolist()],
        "logits": [round(x, 5) for x in logits],
        "shares": [round(x, 5) for x in shares],
    }


def main() -> None:
    timing.parser(__doc__).parse_args()
    rows = [answered(**story) for story in stories()]
    PATH.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
