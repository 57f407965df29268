"""Executing small programs (Fan et al. 2020, section 4): Feedback against Transformer-XL, side by side.

    python examples/programs.py                     # 3 variables; about 20 minutes on one core
    python examples/programs.py --variables 2 --seconds 300
    python examples/programs.py --variables 5 --layers 4 --seconds 1200

Both models read random programs (see `memspan.data.synthetic.Programs`) for the same CPU time, with the
same options and about as many parameters, and learn to say what is printed. Programs have one variable
at the start, and one more after each equal share of the time; the score is the share of printed values
that are right in programs with `--variables`, longer than those of training and never seen. Written: a
JSON file with the curve, and a picture where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memspan.config import FeedbackConfig, TransformerXLConfig
from memspan.data.synthetic import Programs
from memspan.models import LanguageModel

SEGMENT = 64


def model_of(name: str, options: argparse.Namespace) -> LanguageModel:
    size: dict[str, Any] = {
        "n_layers": options.layers,
        "d_model": options.width,
        "n_heads": 4,
        "d_ff": 4 * options.width,
        "memory_length": SEGMENT,
    }
    config = (
        FeedbackConfig(**size)
        if name == "feedback"
        else TransformerXLConfig(**size, positions="learned", max_distance=2 * SEGMENT)
    )
    return LanguageModel(Programs().vocab_size, config)


@torch.no_grad()
def accuracy(model: LanguageModel, variables: int) -> float:
    """Share of the printed values that are likeliest to the model; always the same programs."""
    model.eval()
    tokens, printed = Programs(variables).batch(64, 4 * SEGMENT + 1, np.random.default_rng(7))
    memory, right, asked = None, 0, 0
    for at in range(0, 4 * SEGMENT, SEGMENT):
        out = model(tokens[:, at : at + SEGMENT], memory)
        memory = out.memory
        where = printed[:, at + 1 : at + SEGMENT + 1]
        hits = out.logits.argmax(-1) == tokens[:, at + 1 : at + SEGMENT + 1]
        right, asked = right + int(hits[where].sum()), asked + int(where.sum())
    model.train()
    return right / asked


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """For `--seconds` of CPU time; the curve of the accuracy."""
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    model = model_of(name, options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    curve: list[dict[str, float]] = []
    clock, read, step = 0.0, 0, 0
    while clock < options.seconds:
        start = time.process_time()
        done = min(clock / options.seconds, 1.0)
        n = 1 + int(done * options.variables * 0.999)
        tokens, printed = Programs(n).batch(options.batch_size, options.tokens + 1, random)
        memory = model.initial_memory(options.batch_size)
        for at in range(0, options.tokens, SEGMENT):
            targets = tokens[:, at + 1 : at + SEGMENT + 1]
            out = model(tokens[:, at : at + SEGMENT], memory, targets=targets)
            memory = out.memory.detach()
            assert out.losses is not None
            # What else comes next is chance: only printed values are learned.
            out.losses[printed[:, at + 1 : at + SEGMENT + 1]].mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # Level until half of the time is over, then down to a tenth.
            rate = min(1.0, (step + 1) / 50, 2 * (1.05 - done))
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        read += options.batch_size * options.tokens
        clock += time.process_time() - start
        if len(curve) < 24 * clock / options.seconds:
            score = accuracy(model, options.variables)
            curve.append({"seconds": round(clock, 1), "tokens": read, "accuracy": round(score, 4)})
            print(f"{name:<15}{clock:7.0f} s {read:>11,} tokens   {score:6.1%}", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    return {"model": name, "parameters": parameters, "curve": curve}


def picture(results: list[dict[str, Any]], variables: int, path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: pip install 'memspan[plot]'")
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, unit in zip(axes, ("tokens", "seconds"), strict=True):
        for result in results:
            axis.plot(
                [point[unit] for point in result["curve"]],
                [100 * point["accuracy"] for point in result["curve"]],
                label=result["model"],
            )
        axis.axhline(10, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel(f"{unit} of training")
    axes[0].set_ylabel(f"printed values right, %\n({variables} variables)")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variables", type=int, default=3, help="2, 3 and 5 in the paper")
    parser.add_argument("--seconds", type=float, default=600, help="CPU time for each model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="programs at a time")
    parser.add_argument("--tokens", type=int, default=128, help="words of a program in training")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("programs"), help="folder for results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [train(name, options) for name in ("feedback", "transformer-xl")]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"programs-{options.variables}.json"
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    path.write_text(json.dumps({"options": settings, "results": results}, indent=1) + "\n")
    print(f"written: {path}")
    picture(results, options.variables, path.with_suffix(".png"))
    for result in results:
        last = result["curve"][-1]
        print(
            f"{result['model']:<15} {result['parameters']:>9,} parameters: {last['accuracy']:.1%} of "
            f"printed values right after {last['tokens']:,} tokens"
        )


if __name__ == "__main__":
    main()
