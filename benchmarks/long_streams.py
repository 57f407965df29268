"""Ten million tokens in one stream: is memory constant, and do fast weights keep their precision?

    python benchmarks/long_streams.py                       # about 40 minutes on one core
    python benchmarks/long_streams.py --architectures fast-weights --tokens 1000000

Every architecture, in its own process, reads one stream of the standard library's sources (repeated)
as evaluation does, and reports its resident memory after a tenth and at the end. Then the Fast Weights
transformer, briefly trained, reads a million tokens in float32 and in float64 side by side; the drift
is the largest difference between the layers' memories, relative to the largest value in them. Written:
results/long-streams.json and .png.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plots
import timing
from memspan.lab.data.prepared import prepare
from memspan.models import LanguageModel
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.registry import MODELS
from peak_memory import MIB, growth, resident
from sides import its_own

SIZE = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 256}
SEGMENT = 256
SAMPLES = 100


def text() -> np.ndarray:
    return np.asarray(prepare("python-stdlib", "bytes", None).splits["train"].tokens)


def segments(tokens: np.ndarray, n_tokens: int, length: int = SEGMENT) -> Any:
    """Int64 ``[1, length]``, ``n_tokens`` in all; the text starts again where it ends."""
    for start in range(0, n_tokens, length):
        index = np.arange(start, start + length) % len(tokens)
        yield torch.from_numpy(tokens[index].astype(np.int64))[None]


def read(architecture: str, n_tokens: int) -> list[tuple[int, int, int, float]]:
    """In its own process: tokens, resident bytes, bytes of memory, CPU seconds, a hundred times."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tokens = text()
    model = LanguageModel(256, MODELS[architecture](**its_own(MODELS[architecture], SIZE))).eval()
    reader = model.reader()
    every = max(n_tokens // SAMPLES // SEGMENT, 1)
    points = []
    for n, segment in enumerate(segments(tokens, n_tokens), 1):
        # With targets, as in evaluation; their values do not matter here.
        reader.read(segment, targets=segment)
        if n % every == 0:
            sizes = resident(), reader.memory.nbytes
            points.append((n * SEGMENT, *sizes, time.process_time()))
    return points


def stream(architecture: str, n_tokens: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        points = pool.apply(read, (architecture, n_tokens))
    seen, sizes, memory, seconds = map(list, zip(*points, strict=True))
    return {
        "architecture": architecture,
        "tokens": seen,
        "resident_bytes": sizes,
        "memory_bytes": sorted(set(memory)),
        "growth": growth(sizes, len(points) // 10),
        "tokens_per_cpu_second": (seen[-1] - seen[0]) / (seconds[-1] - seconds[0]),
    }


def briefly_trained(config: FastWeightsConfig, tokens: np.ndarray) -> LanguageModel:
    """200 steps of 8 x 128 bytes with the memory carried, as the trainer does."""
    torch.manual_seed(1)
    model = LanguageModel(256, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = model.initial_memory(8)
    part = len(tokens) // 8
    for step in range(200):
        index = np.arange(8)[:, None] * part + np.arange(step * 128, step * 128 + 129)
        block = torch.from_numpy(tokens[index].astype(np.int64))
        output = model(block[:, :-1], memory, targets=block[:, 1:])
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        memory = output.memory.detach()
    return model.eval()


def drift(rule: str, n_tokens: int) -> dict[str, Any]:
    """The difference between float32 and float64, recorded a hundred times on the way."""
    tokens = text()
    # The delta rule with normalised keys; the sum rule with the denominator it needs.
    normalisation = "sum" if rule == "delta" else "attention"
    config = FastWeightsConfig(**SIZE, rule=rule, normalisation=normalisation)
    single = briefly_trained(config, tokens)
    double = LanguageModel(256, config).double().eval()
    double.load_state_dict(single.state_dict())
    readers = single.reader(), double.reader()
    seen = []
    errors = []
    losses = []
    every = max(n_tokens // SAMPLES // SEGMENT, 1)
    for n, segment in enumerate(segments(tokens, n_tokens), 1):
        targets = segment.roll(-1, 1)
        pair = [reader.read(segment, targets=targets) for reader in readers]
        losses.append(float((pair[0].double() - pair[1]).abs().max()))
        if n % every == 0:
            a, b = (reader.memory.weights.double() for reader in readers)
            errors.append(float((a - b).abs().max() / b.abs().max()))
            seen.append(n * SEGMENT)
    tenth = len(losses) // 10
    return {
        "rule": rule,
        "tokens": seen,
        "relative_error_of_memory": errors,
        "largest_loss_error_first_tenth": max(losses[:tenth]),
        "largest_loss_error_last_tenth": max(losses[-tenth:]),
    }


RULES = {"delta": 0, "sum": 2}
"""Variants of Fast Weights."""


def plot(streams: list[dict[str, Any]], drifts: list[dict[str, Any]], path: Path) -> None:
    """Resident memory, and how far float32 is from float64."""
    figure, (above, below) = plots.panels(2)
    for row in streams:
        mib = [size / MIB for size in row["resident_bytes"]]
        at = [tokens / 1e6 for tokens in row["tokens"]]
        style = plots.look(row["architecture"]) | {"markevery": max(1, len(at) // 8)}
        above.plot(at, mib, label=row["architecture"], **style)
    above.set(xlabel="millions of tokens read", ylabel="resident memory, MiB", ylim=(0, None))
    for row in drifts:
        at = [tokens / 1e6 for tokens in row["tokens"]]
        style = plots.look("fast-weights", RULES[row["rule"]])
        style |= {"markevery": max(1, len(at) // 8)}
        below.semilogy(at, row["relative_error_of_memory"], label=f"rule: {row['rule']}", **style)
    below.set(xlabel="millions of tokens read", ylabel="float32 against float64,\nrelative")
    for axes in (above, below):
        if axes.lines:
            axes.legend(frameon=False, ncols=2)
    plots.save(figure, path)


def shown(row: dict[str, Any]) -> str:
    """A line: of what was recorded on the way the last."""
    last = {name: v[-1] if isinstance(v, list) else v for name, v in row.items()}
    return "; ".join(f"{name} {v}" for name, v in last.items())


def main() -> None:
    parser = timing.parser(__doc__, results="long-streams.json")
    parser.add_argument("--architectures", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens per stream")
    parser.add_argument("--drift-tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    if min(options.tokens, options.drift_tokens) < SAMPLES * SEGMENT:
        parser.error(f"--tokens and --drift-tokens must be at least {SAMPLES * SEGMENT:,}")
    torch.set_num_threads(1)
    streams = []
    drifts = []
    for name in options.architectures:
        streams.append(stream(name, options.tokens))
        print(shown(streams[-1]), flush=True)
    for rule in RULES:
        drifts.append(drift(rule, options.drift_tokens))
        print(shown(drifts[-1]), flush=True)
    result = {"machine": timing.machine(), "streams": streams, "drifts": drifts}
    options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    plot(streams, drifts, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
