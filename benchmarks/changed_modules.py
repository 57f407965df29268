"""What it costs to change a module: hooks on every product, so that modules are called one by one.

    python benchmarks/changed_modules.py

prints, for each architecture, milliseconds of process time for a token, a segment and an update of a
model of width 128, as made and with the hooks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from memspan.models import (
    CompressiveConfig,
    FastWeightsConfig,
    FeedbackConfig,
    LanguageModel,
    TransformerXLConfig,
)

SIZES = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 512}
CONFIGS = {
    "transformer-xl": TransformerXLConfig(**SIZES, memory_length=128),
    "compressive": CompressiveConfig(**SIZES, memory_length=64, compressed_length=64),
    "feedback": FeedbackConfig(**SIZES, memory_length=64),
    "fast-weights": FastWeightsConfig(**SIZES),
}
WORK = ("token", "segment of 128", "update of 4 x 64")


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return 1e3 * statistics.median(taken)


def measured(model: LanguageModel) -> list[float]:
    reader = model.eval().reader()
    one, segment, rows = (torch.randint(256, size) for size in ((1, 1), (1, 128), (4, 64)))
    reader.read(segment)
    found = [
        milliseconds(lambda: reader.read(one), 50),
        milliseconds(lambda: reader.read(segment), 10),
    ]
    model.train()

    def update() -> None:
        out = model(rows, targets=rows)
        assert out.loss is not None
        out.loss.backward()
        model.zero_grad()

    return [*found, milliseconds(update, 5)]


def main() -> None:
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = LanguageModel(256, config)
        before = measured(model)
        for part in model.backbone.modules():
            if type(part) is nn.Linear:
                part.register_forward_hook(lambda *_: None)
        pairs = zip(WORK, before, measured(model), strict=True)
        print(
            name,
            *(f"{work}: {a:.2f} to {b:.2f} ({b / a:.1f}x)" for work, a, b in pairs),
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
