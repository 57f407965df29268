"""How long each head of the shipped Gated DeltaNet remembers: the decays that it has learned.

    python benchmarks/decays.py

Of the first 16,384 bytes of the last tenth of Tiny Shakespeare, read in one stream: after how many
bytes half of a head's matrix is left, by the mean logarithm of its decay, and the bytes after which
least is left. docs/measured/gated_delta_net.md has the table.
"""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import Tensor

import memspan
from memspan.data.named import HELD_OUT
from memspan.models.gated_delta_net import layer as gated_delta_net

LENGTH, SEGMENT = 16_384, 256
RUN = "shakespeare-gated-delta-net"


@torch.no_grad()
def log_decays(text: bytes) -> Tensor:
    """Of every layer, head and byte, ``[L, H, T]``."""
    run = memspan.load(RUN)
    rule, memory, found = gated_delta_net.delta_rule, None, []
    for tokens in torch.tensor([[*text]]).split(SEGMENT, 1):
        with mock.patch.object(gated_delta_net, "delta_rule", wraps=rule) as called:
            memory = run.model(tokens, memory).memory
        found.append(torch.stack([c.kwargs["log_decay"][0] for c in called.call_args_list]))
    return torch.cat(found, 2)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    text = HELD_OUT.read_bytes()[:LENGTH]
    decays = log_decays(text)
    often = [b for b in sorted({*text}) if text.count(b) >= LENGTH // 200]
    print("| layer | head | half is left after | mean decay | least is left by |")
    print("| --- " * 5 + "|")
    for layer, heads in enumerate(decays, 1):
        for head, own in enumerate(heads, 1):
            by_byte = {b: own[torch.tensor([c == b for c in text])].mean().exp() for b in often}
            least = sorted(often, key=lambda b: float(by_byte[b]))[:3]
            named = ", ".join(f"`{chr(b)!r}` {by_byte[b]:.2f}" for b in least)
            half = math.log(0.5) / own.mean()
            print(f"| {layer} | {head} | {half:,.1f} bytes | {own.mean().exp():.3f} | {named} |")


if __name__ == "__main__":
    main()
