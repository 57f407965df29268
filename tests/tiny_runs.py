"""A run of six steps, for tests of what may happen to its folder."""

from __future__ import annotations

from memspan.data.options import DataConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from memspan.runs.options import RunConfig
from memspan.training.options import OptimConfig, TrainConfig

TEXT = "memory is what remains of what was read. " * 30
OPTIONS = RunConfig(
    model=TransformerXLConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4),
    data=DataConfig(corpus="text.txt"),
    optim=OptimConfig(warmup_steps=2),
    train=TrainConfig(
        steps=6,
        batch_size=2,
        segment_length=4,
        evaluate_every=3,
        evaluate_tokens=32,
        save_every=2,
        sample_tokens=0,
        device="cpu",
    ),
)


class PowerCut(BaseException):
    """No handler of ours catches it, as none runs when the power goes."""
