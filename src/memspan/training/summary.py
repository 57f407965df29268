"""What a run says about itself on the terminal: before training and at its end."""

from __future__ import annotations

import lzma
import re
import shlex
from pathlib import Path

from rich.console import Console

from memspan.evaluation import Scores, percent
from memspan.training import metrics
from memspan.training.health import Health
from memspan.training.state import TrainingState
from memspan.training.validation import Validation


def introduce(console: Console, state: TrainingState, folder: Path) -> None:
    """Say what is about to be trained, on what, and where it is written."""
    text, config = state.prepared.splits["train"], state.config
    n_parameters = sum(p.numel() for p in state.model.parameters())
    options = config.train
    passes = options.batch_size * options.tokens_read(options.steps) / len(text.tokens)
    kind = state.prepared.tokenizer.kind
    if state.unknown_share:
        kind += f", {percent(state.unknown_share)} unknown"
    console.print(
        f"{config.architecture}, {n_parameters:,} parameters, on {state.device} in "
        f"{state.precision}\n"
        f"corpus {config.data.corpus}: {len(text.tokens):,} training tokens ({kind}), read "
        f"{passes:.2f} times in {options.steps:,} steps\nrun folder {folder}",
        highlight=False,
    )
    for line in state.precision.notices(state.device, state.model.float32_part()):
        console.print(line, highlight=False)


def conclude(console: Console, state: TrainingState, validation: Validation, folder: Path) -> None:
    """Score the model beside a compressor, show a sample, and say what was written and is next."""
    if state.health != Health():
        console.print(f"{state.health}", highlight=False)
    tokens, _ = validation.text()
    text = state.prepared.tokenizer.decode(tokens)
    _show_score(console, state, validation.score(1), text)
    say = console.print
    if n_tokens := state.config.train.sample_tokens:
        sample = validation.sample(n_tokens)
        say("\nsample:", style="bold")
        say(sample, markup=False, highlight=False)
    pictures = metrics.plot(folder, state.config.model.plots)
    say("\nwritten:", style="bold")
    say(f"  run folder  {folder}\n  metrics     {folder / 'metrics.jsonl'}")
    for picture in pictures:
        say(f"  picture     {picture}")
    if not pictures:
        say("  no picture: pip install 'memspan[plot]' for loss.png")
    quoted = shlex.quote(str(folder))
    say("\nnext:", style="bold")
    # Commands are copied: no line breaks or colours inside.
    for command in (f"evaluate {quoted}", f"generate {quoted} {prompt_from(text)}".rstrip()):
        say(f"  memspan {command}", highlight=False)


def _show_score(console: Console, state: TrainingState, scores: Scores, text: bytes) -> None:
    config, say = state.config, console.print
    n_tokens = config.train.evaluate_tokens
    whole = not 0 < n_tokens < len(state.prepared.splits["validation"].tokens)
    part = "the validation split" if whole else "the validation split's first part"
    how = "every document by itself" if config.data.document_reset else "memory carried"
    say(f"\nfinal score on {part}, {scores.tokens:,} tokens in one stream, {how}:")
    perplexity = f"perplexity per token {scores.perplexity:.2f}"
    if scores.bits_per_byte is None:
        say(f"  {config.architecture:<16} {perplexity}")
        say(
            f"{percent(scores.unknown_share)} of the tokens are unknown and their text is not "
            "scored: there are no bits per byte, and the model cannot be compared with lzma, a "
            "compressor."
        )
        return
    baseline = 8 * len(lzma.compress(text, preset=9)) / len(text)
    bits = f"{scores.bits_per_byte:.3f} bits per byte"
    say(f"  {config.architecture:<16} {bits}   ({perplexity})")
    say(f"  {'lzma':<16} {baseline:.3f} bits per byte   (the same text)")
    say(
        "Lower is better: the model predicts this text better than a strong compressor does."
        if scores.bits_per_byte < baseline
        else "Lower is better. After minutes of training it is normal not to reach lzma, a strong "
        "compressor, yet: more --train.steps and a larger model do."
    )


def prompt_from(text: bytes) -> str:
    """A ``--prompt`` from the first words of ``text``; empty if it has no plain ones."""
    for line in text[:4096].decode(errors="replace").splitlines():
        words = re.match(r"\w[\w ,.:;'()-]{2,23}(?!\w)", line.strip())
        if words and "\N{REPLACEMENT CHARACTER}" not in words[0]:
            return f"--prompt {shlex.quote(words[0].strip())}"
    return ""
