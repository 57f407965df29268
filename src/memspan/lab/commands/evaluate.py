"""``memspan evaluate``: score a text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memspan.errors import counted
from memspan.lab.commands.parsing import (
    Field,
    ReadingArguments,
    Split,
    parsed,
    with_architectures,
)
from memspan.lab.commands.standard_streams import STDIN, readable
from memspan.lab.commands.threads import announce, set_threads
from memspan.lab.printing import say
from memspan.lab.runs.options import load_config

if TYPE_CHECKING:
    from memspan.lab.evaluation import Evaluation
    from memspan.lab.runs.run import Run


@dataclass(frozen=True)
class EvaluateArguments(ReadingArguments):
    """Score a text with a trained model: every token once, memory carried from start to end."""

    corpus: str | None = None
    """A named corpus, file, folder or glob; -: standard input (None: the run's own)."""
    field: Field = None
    split: Split = "auto"
    tokens: int = 0
    """Score only the first N tokens (0: all)."""
    batch_size: int = 1
    """Parallel streams. 1 is the exact protocol; more are faster, but cut the text."""
    segment_length: int | None = None
    """Tokens read per step (None: as in training, or fewer if a longer memory leaves too few learned
    positions)."""
    memory: Path | None = None
    """Start from this saved memory (generate --save-memory) instead of an empty one. For one stream
    only."""
    per_token: Path | None = None
    """Write each token's loss to this new file, in JSON Lines: position, token (its id) and nats."""
    json: bool = False
    """Print the scores as one JSON object."""


def evaluate(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    kind = with_architectures(EvaluateArguments, "memory_options", "reader_options")
    options = parsed(kind, arguments, "memspan evaluate")
    # Before torch is imported, which takes seconds.
    load_config(options.run)
    with readable(options.corpus, options.split) as text:
        announce(set_threads(options.threads))
        import memspan
        from memspan.lab.training.terminal import counting

        run, precision = options.open_run()
        with counting("scoring", "tokens") as progress:
            scores = memspan.evaluate(
                run,
                **text,
                precision=precision,
                progress=progress,
                **options.keywords("corpus", "split", "json"),
            )
    if options.corpus == STDIN:
        scores = dataclasses.replace(scores, corpus="standard input")
    if options.json:
        print(json.dumps(scores.as_dict()))
    else:
        _print(scores, run, options.memory)


def _print(scores: Evaluation, run: Run, before: Path | None) -> None:
    from memspan.lab.evaluation import percent
    from memspan.precision import Precision

    config = run.config.model
    memory = []
    for name in (option.name for option in dataclasses.fields(config.memory_options)):
        size = scores.memory.get(name, getattr(config, name))
        if isinstance(size, int) or size not in (None, getattr(type(config), name)):
            memory.append(f"{name.replace('_length', '')} {size}")
    memory += [f"{name.replace('_', ' ')} {value}" for name, value in scores.reading.items()]
    context = run.model.backbone.context(scores.segment_length, **scores.reading)
    if context is not None and before is not None and not scores.reading:
        memory.append(f"no memory but the window of {before}")
    elif context is not None:
        least, most = context
        memory.append(f"no memory: each token sees {least:,} to {most:,} before it")
    precision = Precision(scores.precision, scores.matmul_precision)
    if precision != Precision():
        memory.append(str(precision))
    apart = run.config.data.document_reset
    how = "every document by itself" if apart else "memory carried from start to end"
    if context is not None and not apart:
        how = "read from start to end"
    if before is not None:
        how += f", on top of {before}"
    streams = (
        f"one stream, {how} (exact)"
        if scores.streams == 1
        else f"{scores.streams} streams: the text is cut, each part starts with empty memory"
    )
    tokens = counted(scores.tokens, "token")
    say(f"{scores.run}  {scores.corpus}, {scores.split}: {tokens}, {streams}")
    memory = memory or ["memory of constant size"]
    say(", ".join([f"segment {scores.segment_length}", *memory]))
    if scores.n_unknown:
        say(f"  unknown tokens       {scores.n_unknown:10,} ({percent(scores.unknown_share)})")
        say("  no bits per byte or character: the text of unknown tokens is not scored")
    elif scores.altered:
        say("  no bits per byte or character: the tokeniser does not restore this text")
    else:
        say(f"  bits per byte        {scores.bits_per_byte:10.4f}")
        say(f"  bits per character   {scores.bits_per_character:10.4f}")
    say(f"  nats per token       {scores.nats_per_token:10.4f}")
    say(f"  perplexity per token {scores.perplexity:10.2f}")
    if run.tokenizer.kind not in ("bytes", "characters") and not scores.altered:
        # For bytes and characters it has seven digits, and papers do not report it.
        say(f"  perplexity per word  {scores.word_perplexity:10.2f}")
    say(f"  {scores.seconds:.1f} s, {scores.tokens_per_second:,.0f} tokens/s")
