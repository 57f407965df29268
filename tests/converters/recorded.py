"""Runs that were converted, and what the peers of their kinds recorded."""

from __future__ import annotations

import torch
from torch import Tensor

import memspan
from golden import Golden, assert_same
from readings import read


def check_run(run: memspan.Run, g: Golden) -> None:
    """What its model gives, in the recorded segments and from its own first memory."""
    hf = g.set == "hf_transfo_xl"

    def segments(key: str) -> Tensor:
        found = [g[key.format(i)] for i in g.segments]
        return torch.cat(found if hf else [x.transpose(0, 1) for x in found], 1)

    tokens = segments("in.seg{}.input_ids" if hf else "in.seg{}.tokens")
    logits, _ = read(run.model.double(), tokens, g.config["segments"])
    assert_same(logits.log_softmax(-1), segments("f64.seg{}.logprobs"), 1e-9, g.set)
