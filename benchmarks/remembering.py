"""What a token in memory costs, and how fast tokens are generated: Feedback against Transformer-XL.

    python benchmarks/remembering.py [--span 256] [--rounds 7]

Both have the same size, a full memory of `--span` tokens, and generate one row at a time on one thread.
Bytes are per token in memory: in the memory that is carried and saved, and in the keys and values that
a reader stores beside it. Tokens per second are those of the median round, in CPU time, sides taking
turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

from memspan.models import LanguageModel
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.transformer_xl.config import TransformerXLConfig
from timing import interleaved

SIZE = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 512}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--span", type=int, default=256, help="tokens of memory")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    span = options.span
    configs = {
        "feedback": FeedbackConfig(**SIZE, memory_length=span),
        "feedback per-layer": FeedbackConfig(**SIZE, memory_length=span, projections="per-layer"),
        "transformer-xl": TransformerXLConfig(**SIZE, memory_length=span, attention_span="fixed"),
    }
    calls: dict[str, Callable[[], object]] = {}
    sizes = {}
    for name, config in configs.items():
        model = LanguageModel(256, config).eval()
        reader = model.reader()
        reader.read(torch.randint(256, (1, span)))
        token = torch.randint(256, (1, 1))
        calls[name] = lambda reader=reader, token=token: reader.read(token)
        memory = model.initial_memory(1)
        vectors = memory.vectors if hasattr(memory, "vectors") else memory.hidden
        # Keys and values: of every layer, or one of each for all.
        width = 2 * config.n_heads * config.head_width * vectors.element_size()
        groups = 1 if getattr(config, "projections", "per-layer") == "shared" else config.n_layers
        parameters = sum(p.numel() for p in model.parameters())
        sizes[name] = (vectors.nbytes // span, groups * width, parameters)
    times = interleaved(calls, options.rounds)
    print(f"{'':<20}{'parameters':>12}{'memory':>9}{'keys, values':>14}{'tokens/s':>10}")
    for name, (kept, kv, parameters) in sizes.items():
        speed = 1 / median(times[name])
        print(f"{name:<20}{parameters:>12,}{kept:>7} B{kv:>12} B{speed:>10,.0f}")


if __name__ == "__main__":
    main()
