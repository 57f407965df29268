"""How fast memspan learns: Transformer-XL with memory against a plain GPT, on Tiny Shakespeare.

Both are trained in one process on one thread, in alternating slices so that other work on the machine
affects both, and for the same process CPU time. The plain GPT follows nanoGPT's recipe for a CPU: 4
layers, 4 heads, width 128, context 64, batch 12, 2,000 steps, learning rate 1e-3 to 1e-4, 100 steps
of warm-up, no dropout. Transformer-XL is one of memspan's presets, trained by its own trainer, for as
many steps as fit the GPT's time. Both are scored on the last tenth of the text in nats per
character: the GPT in windows of its context, Transformer-XL with its memory carried throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import plots
from memspan.runs.options import RunConfig, preset_file, read_config
from peers.gpt import GPT
from shakespeare import add_text, parts
from sides import Side
from timing import machine

HERE = Path(__file__).resolve().parent
SLICE = 100
"""Steps of the GPT between changes of side."""


class GPTRun:
    """nanoGPT's recipe: random crops, AdamW, cosine."""

    CONTEXT, BATCH, RATE, WARMUP = 64, 12, 1e-3, 100

    def __init__(self, text: np.ndarray, steps: int, seed: int = 1, rate: float = RATE) -> None:
        self.rate = rate
        torch.manual_seed(seed)
        self.text, self.steps, self.step = torch.from_numpy(text.astype(np.int64)), steps, 0
        self.random = torch.Generator().manual_seed(seed)
        self.model = GPT(256, self.CONTEXT, n_layers=4, n_heads=4, d_model=128, d_ff=512)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.99),
            fused=True,
        )

    def update(self) -> None:
        starts = torch.randint(
            len(self.text) - self.CONTEXT, (self.BATCH,), generator=self.random
        ).tolist()
        block = torch.stack([self.text[i : i + self.CONTEXT + 1] for i in starts])
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        logits = self.model(block[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def score(self, text: np.ndarray, stride: int = CONTEXT) -> float:
        """Nats per character in windows of ``CONTEXT``, of which the last ``stride`` count.

        A stride of ``CONTEXT`` is what nanoGPT does: each character once, half a context on average.
        A smaller one gives each character nearly a full context, at a multiple of the cost.
        """
        characters = torch.from_numpy(text.astype(np.int64))
        windows = characters.unfold(0, self.CONTEXT + 1, stride)
        total, count = 0.0, 0
        with torch.no_grad():
            for block in windows.split(64):
                losses = F.cross_entropy(
                    self.model(block[:, :-1]).transpose(1, 2), block[:, 1:], reduction="none"
                )[:, -stride:]
                total, count = total + losses.sum().item(), count + losses.numel()
        return total / count

    def _learning_rate(self) -> float:
        if self.step < self.WARMUP:
            return self.rate * (self.step + 1) / self.WARMUP
        done = (self.step - self.WARMUP) / (self.steps - self.WARMUP)
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def seconds_per_step(config: RunConfig[Any], text: Path, train: np.ndarray) -> tuple[float, float]:
    """CPU seconds per step of both sides, medians over interleaved rounds."""
    sides = (GPTRun(train, 2000), Side(config, text))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(8):
        for side, seconds in zip(sides, times, strict=True):
            seconds.append(timed(side.update, 10) / 10)
    # The first round warms up.
    return float(np.median(times[0][1:])), float(np.median(times[1][1:]))


def timed(update: Any, steps: int) -> float:
    start = time.process_time()
    for _ in range(steps):
        update()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_text(parser)
    parser.add_argument(
        "--preset",
        type=Path,
        default=preset_file("tiny-shakespeare"),
        help="memspan's preset (default: tiny-shakespeare)",
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps of the GPT (default: 2000)")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "results",
        help="folder for learning.json and learning.png (default: benchmarks/results)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    train, validation = parts(options.text)
    preset = read_config(options.preset)

    theirs, ours = seconds_per_step(preset, options.text, train)
    # The preset's steps are for all of the recipe's time; 1% less, so that ours ends first.
    steps = int(0.99 * options.steps * theirs / ours)
    config = dataclasses.replace(preset, train=dataclasses.replace(preset.train, steps=steps))
    print(f"CPU seconds per step: GPT {theirs:.4f}, Transformer-XL {ours:.4f}: {steps:,} steps")

    gpt = GPTRun(train, options.steps)
    xl = Side(config, options.text)
    sizes = [sum(p.numel() for p in gpt.model.parameters()), xl.n_parameters]
    print(f"parameters: GPT {sizes[0]:,}, Transformer-XL {sizes[1]:,}")
    curves: dict[str, list[dict[str, float]]] = {"gpt": [], "transformer-xl": []}
    seconds = {"gpt": 0.0, "transformer-xl": 0.0}
    sides = {"gpt": (gpt, options.steps), "transformer-xl": (xl, steps)}
    scores = {"gpt": gpt.score, "transformer-xl": partial(xl.score, streams=16)}
    slices = max(1, options.steps // SLICE)
    for i in range(1, slices + 1):
        for name, (side, last) in sides.items():
            seconds[name] += timed(side.update, last * i // slices - side.step)
            if i % 2 == 0 or i == slices:
                nats = scores[name](validation)
                curves[name].append(
                    {"seconds": seconds[name], "step": side.step, "nats_per_character": nats}
                )
                print(f"{name:<15} step {side.step:>6,} {seconds[name]:7.1f} s  {nats:.4f}")
    final = {
        "gpt": gpt.score(validation),
        "gpt, windows moved by 8": gpt.score(validation, stride=8),
        "transformer-xl": xl.score(validation),
    }
    tokens = {
        "gpt": options.steps * GPTRun.BATCH * GPTRun.CONTEXT,
        "transformer-xl": steps * config.train.batch_size * config.train.segment_length,
    }
    for name, nats in final.items():
        print(f"{name:<24} {nats:.4f} nats per character, {nats / math.log(2):.4f} bits")
    result = {
        "nats_per_character": final,
        "cpu_seconds": seconds,
        "tokens_trained": tokens,
        "parameters": dict(zip(sides, sizes, strict=True)),
        "steps": {name: last for name, (_, last) in sides.items()},
        "preset": dataclasses.asdict(config),
        "curves": curves,
        "machine": machine(),
    }
    result["preset"]["data"]["corpus"] = "tiny-shakespeare"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "learning.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(curves, sizes, options.output / "learning.png")
    print(f"written: {options.output / 'learning.json'}, {options.output / 'learning.png'}")


def plot(curves: dict[str, list[dict[str, float]]], sizes: list[int], path: Path) -> None:
    """Both curves, with their last losses."""
    figure, (axes,) = plots.panels(1, 3.4)
    labels = {"gpt": "plain GPT, nanoGPT's recipe", "transformer-xl": "Transformer-XL with memory"}
    looks = {"gpt": "transformer", "transformer-xl": "transformer-xl"}
    for (name, label), size in zip(labels.items(), sizes, strict=True):
        x, y = zip(*((p["seconds"], p["nats_per_character"]) for p in curves[name]), strict=True)
        axes.plot(x, y, label=f"{label}, {size:,} parameters", **plots.look(looks[name]))
        axes.annotate(
            f"{y[-1]:.3f}", (x[-1], y[-1]), (5, 0), textcoords="offset points", va="center"
        )
    axes.set(
        xlabel="CPU seconds of training, one thread",
        ylabel="validation loss, nats per character",
    )
    axes.set_ylim(top=min(2.8, axes.get_ylim()[1]))
    axes.margins(x=0.13)
    plots.name_lines(figure, axes, columns=1)
    plots.save(figure, path)


if __name__ == "__main__":
    main()
