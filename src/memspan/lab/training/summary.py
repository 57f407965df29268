"""Messages on the terminal before and after training."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import torch
from rich.console import Console

from memspan.errors import MemspanError, counted
from memspan.files.disk import write_atomically
from memspan.lab.data.options import title
from memspan.lab.evaluation import Scores, percent
from memspan.lab.invocation import command
from memspan.lab.printing import quoted
from memspan.lab.training import metrics
from memspan.lab.training.optimisers import learning_rate
from memspan.lab.training.state import Health, TrainingState
from memspan.lab.training.validation import MIN_P, Validation
from memspan.memory import Memory

PROMPT_LINES = 3
"""Lines of a sample's prompt that are shown, the last ones."""
PROMPT_WIDTH = 100
"""Characters of each of these lines that are shown, the last ones."""
SCORES = "scores.json"
"""The file with the scores at the end of training."""
LEAST_WORTH = 0.002
"""Smallest saving by memory that is reported, as a share of the loss: less may be chance."""


def introduce(console: Console, state: TrainingState, folder: Path) -> None:
    """Print the model, the device, the corpus and the run folder."""
    text = state.prepared.splits["train"]
    config = state.config
    n_parameters = sum(p.numel() for p in state.model.parameters())
    options = config.train
    left = options.tokens_read(state.steps) - options.tokens_read(state.step)
    passes = (state.tokens_read + options.batch_size * left) / len(text.tokens)
    kind = state.prepared.tokenizer.kind
    if state.unknown_share:
        kind += f", {percent(state.unknown_share)} unknown"
    on = f"{state.device} in {state.precision}"
    if state.device.type == "cpu":
        on += f" with {counted(torch.get_num_threads(), 'thread')}"
    console.print(
        f"{config.architecture}, {n_parameters:,} parameters, on {on}\n"
        f"corpus {title(config.data.texts)}: {len(text.tokens):,} training tokens ({kind}), read "
        f"{passes:.2f} times in {counted(state.steps, 'step')}\nrun folder {folder}",
        highlight=False,
    )
    for line in state.precision.notices(state.device, state.model.float32_part()):
        console.print(line, highlight=False)
    if state.steps <= (warmup := config.optim.warmup_steps):
        last = learning_rate(state.steps - 1, config.optim, state.steps)
        console.print(
            f"the run ends within its warm-up of {counted(warmup, 'step')}, at a learning rate of "
            f"{last:.2g} instead of {config.optim.learning_rate:.2g}: train longer, or lower "
            "--optim.warmup-steps",
            highlight=False,
        )


def conclude(console: Console, state: TrainingState, folder: Path) -> None:
    """Print the files written, a sample after held-out text, the scores, and commands to go on with."""
    say = console.print
    validation = Validation(state)
    carried = validation.score(1)
    remembers = state.model.backbone.memory_type is not Memory
    emptied = validation.score(1, emptied=True) if remembers else None
    ends = {"memory carried": carried, "memory emptied while reading": emptied}
    if state.health != Health():
        say(f"{state.health}", highlight=False)
    say("\nwritten:", style="bold")
    say(f"  run folder  {folder}\n  metrics     {folder / 'metrics.jsonl'}")
    say(f"  scores      {folder / SCORES}")
    try:
        for picture in metrics.plot(folder, state.config.model.plots, ends):
            say(f"  picture     {picture}")
    except MemspanError as error:
        # Everything that matters is saved.
        say(f"  no picture: {error}")
    tokens, _ = validation.text()
    text = state.prepared.tokenizer.decode(tokens)
    if n_tokens := state.config.train.sample_tokens:
        sample = validation.sample(n_tokens)
        if state.processes.first:
            metrics.keep_sample(folder, state.step, sample)
        say("\nthe prompt, from the held-out text, ends with:", style="bold")
        # The end of a long line.
        prompt = validation.prompt().decode(errors="replace").rstrip("\n")
        for line in prompt.splitlines()[-PROMPT_LINES:]:
            say(quoted(line[-PROMPT_WIDTH:]), markup=False, highlight=False)
        say("the model continues:", style="bold")
        say(quoted(sample), markup=False, highlight=False)
    _show_score(console, state, carried, emptied, text, folder)
    words = prompt_from(text)
    chosen = ["--prompt", words, "--min-p", MIN_P] if words else []
    say("\nnext:", style="bold")
    # Commands are copied: no colours inside, and a break that a shell joins.
    columns = console.width - 2 if console.is_terminal else None
    for arguments in (["generate", folder, *chosen], ["evaluate", folder], ["measure", folder]):
        say(f"  {command(*arguments, columns=columns)}", highlight=False)


def _show_score(
    console: Console,
    state: TrainingState,
    scores: Scores,
    without: Scores | None,
    text: bytes,
    folder: Path,
) -> None:
    """Print the score with and without memory and a compressor's; write them to ``scores.json``."""
    config = state.config
    say = console.print
    n_tokens = config.train.evaluate_tokens
    whole = not 0 < n_tokens < len(state.prepared.splits["validation"].tokens)
    part = "the validation split" if whole else "the validation split's first part"
    apart = ", every document by itself" if config.data.document_reset else ""
    rows = {"memory carried": _in_words(scores)}
    kept: dict[str, object] = {
        "step": state.step,
        "split": "validation",
        "tokens": scores.tokens,
        "streams": 1,
        "memory_carried": _numbers(scores),
    }
    if without is not None:
        rows[f"memory emptied every {counted(scores.segment_length, 'token')}"] = _in_words(without)
        kept["memory_emptied"] = _numbers(without)
        saved = 1 - scores.nats / without.nats
        worth = "memory is not used yet"
        if saved >= LEAST_WORTH:
            worth = (
                f"memory saves {saved:.1%} compared with emptying it while reading; a model trained "
                "without memory may lose less"
            )
    else:
        worth = "this architecture has no memory"
    if scores.bits_per_byte is not None:
        compressed = _compressed(text)
        rows["lzma, a compressor"] = f"{compressed:.3f} bits per byte"
        kept["lzma"] = {"bits_per_byte": compressed}
    if state.processes.first:
        content = json.dumps(kept, indent=1) + "\n"
        write_atomically(folder / SCORES, content.encode(), make_folder=False)
    say(f"\nscore on {part}, {counted(scores.tokens, 'token')} in one stream{apart}:")
    for what, score in rows.items():
        say(f"  {what:<{max(map(len, rows))}}   {score}", highlight=False)
    say(f"Lower is better: {worth}.")
    if scores.n_unknown:
        say(
            f"{percent(scores.unknown_share)} of the tokens are unknown, and their text is not scored: "
            "there are no bits per byte to compare with lzma, a compressor."
        )
    if config.train.batch_size > 1:
        say(
            f"Validations during training read it in {config.train.batch_size} streams, each from an "
            "empty memory: faster, and slightly worse.",
        )


def _numbers(scores: Scores) -> dict[str, float | None]:
    names = ("nats_per_token", "bits_per_byte", "bits_per_character", "perplexity")
    return {name: getattr(scores, name) for name in names}


def _in_words(scores: Scores) -> str:
    perplexity = f"perplexity per token {scores.perplexity:.2f}"
    if scores.bits_per_byte is None:
        return perplexity
    return f"{scores.bits_per_byte:.3f} bits per byte   (perplexity {scores.perplexity:.2f})"


def _compressed(text: bytes) -> float:
    """Bits per byte of ``text`` compressed by lzma, without a file header."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return 8 * len(lzma.compress(text, lzma.FORMAT_RAW, filters=filters)) / len(text)


def prompt_from(text: bytes) -> str:
    """A prompt from the first words of ``text``; empty if it has no plain ones."""
    for line in text[:4096].decode(errors="replace").splitlines():
        words = re.match(r"\w[\w ,.:;'()-]{2,23}(?!\w)", line.strip())
        if words and "\N{REPLACEMENT CHARACTER}" not in words[0]:
            return words[0].strip()
    return ""
