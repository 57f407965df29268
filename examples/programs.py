"""Executing small programs (Fan et al. 2020): Feedback against Transformer-XL, side by side.

    python examples/programs.py                     # 3 variables; 20 minutes on one core
    python examples/programs.py --variables 2
    python examples/programs.py --variables 5

Both models read random programs (see `Programs`) for the same CPU time, with
the same options and about as many parameters, and learn to predict what is printed. In the first
quarter of the time programs get longer, from 16 words to `--tokens`, and get more variables, from one
to `--variables`. The score is the share of printed values predicted correctly in 64 programs, twice as
long as those of training. The baseline repeats the last known value, assigned or printed. Written: a
JSON file with the curves, and a picture if matplotlib is installed. With two cores, run `--models
feedback` and `--models transformer-xl` at once: results with the same options stay in the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memspan.models import FeedbackConfig, LanguageModel, TransformerXLConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import plots
import timing

# ----- The task

VARIABLES = ("x", "y", "z", "p", "r")
HIGHEST = 10
"""Largest value; each value from 1 on is one word."""
WORDS = (
    *VARIABLES, *map(str, range(1, HIGHEST + 1)), "=", "++", "--", "print", "if", "<", ">", ":", ";",
)  # fmt: skip
"""Text of each token id."""
IDS = {word: i for i, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Programs:
    """Random straight-line programs; what each ``print`` prints follows in the text.

    A program first assigns to each of its variables, as in ``x = 4 ;``, and never again. Then come
    ``print x 5 ;``, ``if x > 3 : y ++ ;``, where the body changes another variable than the
    condition tests (if there is one), and ``x ++ ;`` or ``x -- ;``, equally likely. Values never
    leave 1 to 10.

    A printed value is revealed, and unconditional changes can be counted in any order; a condition
    needs the current value. With few prints and many conditions, values depend on long chains of
    earlier ones. Differs from the paper: all assignments come first, the body of an ``if`` does not
    print, and a program ends where the row does.
    """

    n_variables: int = 3
    """Variables in a program (the paper: 2, 3 and 5)."""
    prints: float = 0.15
    """Share of the statements that print."""
    conditions: float = 0.5
    """Share of the statements with a condition."""

    def __post_init__(self) -> None:
        if not 1 <= self.n_variables <= len(VARIABLES):
            raise ValueError(f"n_variables must be 1 to {len(VARIABLES)}, not {self.n_variables}")
        if min(self.prints, self.conditions) < 0 or self.prints + self.conditions > 1:
            raise ValueError(
                f"prints {self.prints} and conditions {self.conditions} are shares: "
                "neither may be below 0, nor their sum above 1"
            )

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(WORDS)

    def batch(
        self, batch_size: int, n_tokens: int, random: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """One program per row, cut at ``n_tokens``.

        Returns:
            tokens int64 ``[B, N]``, and bool ``[B, N]``, true where a token is a printed value.
        """
        rows = [self.program(n_tokens, random)[:n_tokens] for _ in range(batch_size)]
        tokens = torch.tensor([[IDS[word] for word in row] for row in rows])
        printed = torch.zeros_like(tokens, dtype=torch.bool)
        printed[:, 2:] = tokens[:, :-2] == IDS["print"]
        return tokens, printed

    def program(self, n_words: int, random: np.random.Generator) -> list[str]:
        """The words of a program of at least ``n_words``."""
        names = VARIABLES[: self.n_variables]
        state: dict[str, int] = {}
        words: list[str] = []
        for i in random.permutation(self.n_variables):
            state[names[i]] = int(random.integers(1, HIGHEST + 1))
            words += [names[i], "=", str(state[names[i]]), ";"]
        while len(words) < n_words:
            kind = random.random()
            name = names[random.integers(len(names))]
            if kind < self.prints:
                words += ["print", name, str(state[name]), ";"]
            elif kind < self.prints + self.conditions:
                # A limit that every value meets, or none, would not be a condition.
                sign = "<>"[random.integers(2)]
                limit = int(random.integers(2, HIGHEST))
                holds = state[name] < limit if sign == "<" else state[name] > limit
                others = [other for other in names if other != name] or names
                target = others[random.integers(len(others))]
                # If the condition fails, the body has no effect.
                body = _change(random, target, state if holds else dict(state))
                words += ["if", name, sign, str(limit), ":", *body]
            else:
                words += _change(random, name, state)
        return words


def execute(words: list[str]) -> list[int]:
    """Run a program and return what it prints; the printed values in ``words`` are ignored."""
    state: dict[str, int] = {}
    printed = []
    for statement in " ".join(words).split(" ;"):
        parts = statement.split()
        if parts[:1] == ["if"]:
            left = state[parts[1]]
            sign = parts[2]
            right = int(parts[3])
            if not (left < right if sign == "<" else left > right):
                continue
            parts = parts[5:]
        if parts[:1] == ["print"]:
            printed.append(state[parts[1]])
        elif parts[1:2] == ["="]:
            state[parts[0]] = int(parts[2])
        elif parts:
            state[parts[0]] += 1 if parts[1] == "++" else -1
    return printed


def _change(random: np.random.Generator, name: str, state: dict[str, int]) -> list[str]:
    """Increment or decrement a variable at random; at the end of the range, the only way left."""
    step = 1 if random.integers(2) else -1
    if not 1 <= state[name] + step <= HIGHEST:
        step = -step
    state[name] += step
    return [name, "++" if step > 0 else "--", ";"]


# ----- The models and their training

MODELS = ("feedback", "transformer-xl")
SEGMENT = 64
SHORTEST = 16
"""Words of the first programs."""
GROWING = 0.25
"""Share of the time after which programs have full length and all variables."""


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
    return LanguageModel(len(WORDS), config)


def examination(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The test programs, always the same, and where they print."""
    return Programs(options.variables).batch(64, 2 * options.tokens + 1, np.random.default_rng(7))


@torch.no_grad()
def accuracy(model: LanguageModel, options: argparse.Namespace) -> float:
    """Share of the printed values that the model finds likeliest."""
    model.eval()
    tokens, printed = examination(options)
    memory = None
    right = 0
    asked = 0
    for at in range(0, tokens.shape[1] - 1, SEGMENT):
        out = model(tokens[:, at : at + SEGMENT], memory)
        memory = out.memory
        where = printed[:, at + 1 : at + SEGMENT + 1]
        hits = out.logits.argmax(-1) == tokens[:, at + 1 : at + SEGMENT + 1]
        right = right + int(hits[where].sum())
        asked = asked + int(where.sum())
    model.train()
    return right / asked


def unchanged(options: argparse.Namespace) -> float:
    """Share of the printed values that equal the value last assigned or printed."""
    right = asked = 0
    tokens, printed = examination(options)
    for row, mask in zip(tokens.tolist(), printed.tolist(), strict=True):
        known = {}
        for i in range(2, len(row)):
            if mask[i]:
                right = right + (known[row[i - 1]] == row[i])
                asked = asked + 1
                known[row[i - 1]] = row[i]
            elif row[i - 1] == IDS["="]:
                known[row[i - 2]] = row[i]
    return right / asked


def stage(done: float, options: argparse.Namespace) -> tuple[int, int]:
    """Variables and words of the programs after this share of the time."""
    grown = min(done / GROWING, 1.0)
    doublings = int(math.log2(options.tokens / SHORTEST))
    return (
        1 + int(grown * options.variables * 0.999),
        min(options.tokens, SHORTEST * 2 ** int(grown * (doublings + 1))),
    )


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train for `--seconds` of CPU time; returns the curve of the accuracy."""
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    model = model_of(name, options)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=0.01,
        fused=True,
    )
    curve: list[dict[str, float]] = []
    clock = 0.0
    read = 0
    step = 0
    while clock < options.seconds:
        start = time.process_time()
        done = clock / options.seconds
        variables, words = stage(done, options)
        segment = min(words, SEGMENT)
        rows = max(options.words_per_update // segment, 1)
        tokens, printed = Programs(variables).batch(rows, words + 1, random)
        memory = model.initial_memory(rows)
        for at in range(0, words, segment):
            here = slice(at + 1, at + segment + 1)
            # Everything else is random: only printed values are learned.
            targets = tokens[:, here].masked_fill(~printed[:, here], -100)
            out = model(tokens[:, at : at + segment], memory, targets=targets)
            memory = out.memory.detach()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            # Constant for half of the time, then down to a tenth.
            rate = min(1.0, (step + 1) / 50, 2 * (1.05 - done))
            optimizer.param_groups[0]["lr"] = options.learning_rate * rate
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        read += rows * words
        clock += time.process_time() - start
        if len(curve) < 24 * clock / options.seconds:
            score = accuracy(model, options)
            curve.append({"seconds": round(clock, 1), "tokens": read, "accuracy": round(score, 4)})
            print(f"{name:<15}{clock:7.0f} s {read:>11,} tokens   {score:6.1%}", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    return {"model": name, "parameters": parameters, "curve": curve}


def picture(results: list[dict[str, Any]], known: float, variables: int, path: Path) -> None:
    try:
        figure, panels = plots.panels(2, sharey=True)
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    for axes, unit, size in zip(panels, ("tokens", "seconds"), (1e6, 1), strict=True):
        for result in results:
            axes.plot(
                [point[unit] / size for point in result["curve"]],
                [100 * point["accuracy"] for point in result["curve"]],
                label=result["model"],
                **plots.look(result["model"]),
            )
        never = plots.look("transformer") | {"marker": ""}
        axes.axhline(100 * known, label="last value known", **never)
        axes.set_ylabel(f"printed values right, %\n({variables} variables)")
    panels[0].set_xlabel("millions of tokens of training")
    panels[1].set_xlabel("seconds of training")
    plots.name_lines(figure, panels[0])
    plots.save(figure, path)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of a command line (None: this program's)."""
    parser = timing.parser(__doc__)
    parser.add_argument("--variables", type=int, default=3, help="2, 3 and 5 in the paper")
    parser.add_argument("--seconds", type=float, default=600, help="CPU time for each model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="words of the longest in training")
    parser.add_argument("--words-per-update", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--out", type=Path, default=Path("programs"), help="folder for results")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    by_name = {name: train(name, options) for name in options.models}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"programs-{options.variables}.json"
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "models")}
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("options") == settings:
        by_name = {result["model"]: result for result in before["results"]} | by_name
    results = [by_name[name] for name in MODELS if name in by_name]
    known = unchanged(options)
    found = {"options": settings, "last_value_known": round(known, 4), "results": results}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path}")
    picture(results, known, options.variables, path.with_suffix(".png"))
    for result in results:
        last = result["curve"][-1]
        print(
            f"{result['model']:<15} {result['parameters']:>9,} parameters: {last['accuracy']:.1%} of "
            f"printed values right after {last['tokens']:,} tokens"
        )
    print(f"{'last value known':<15} {known:.1%}")


if __name__ == "__main__":
    main()
