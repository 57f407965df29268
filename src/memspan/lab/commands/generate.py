"""``memspan generate``: continue a text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import tyro

from memspan.errors import MemspanError, counted
from memspan.lab.commands.parsing import ReadingArguments, parsed, with_architectures
from memspan.lab.commands.threads import announce, set_threads
from memspan.lab.printing import say
from memspan.lab.runs.options import load_config
from memspan.lab.sampling import DEFAULT, Sampling

if TYPE_CHECKING:
    from memspan.lab.generation.writer import Writer

CHUNK = 1 << 14
"""Bytes of --prompt-file held in memory at once."""


@dataclass(frozen=True)
class GenerateArguments(ReadingArguments):
    """Continue a text. Reading and writing take constant memory, whatever the length."""

    prompt: str | None = None
    """Text to continue (None: a line break or, if the vocabulary has none, its first token)."""
    prompt_file: Path | None = None
    """File of any length, whose text is read before the prompt; -: standard input."""
    tokens: int = 400
    """Tokens to generate per sample (0: only read)."""
    samples: int = 1
    """Continuations of the same prompt, generated in parallel."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; the one that ended it is left out."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = DEFAULT
    greedy: bool = False
    """Always take the most likely token, as with --temperature 0."""
    cuda_graph: bool = False
    """Launch the pass of each token as one CUDA graph; not tried on a GPU yet."""
    memory: Path | None = None
    """Start from this saved memory instead of an empty one."""
    save_memory: Path | None = None
    """At the end, save the first sample's memory of everything read and generated to this file."""
    json: bool = False
    """Print one JSON object at the end: the run, the prompt (not --prompt-file's text), and for
    each sample its text without the prompt, the ids of its tokens, and their log-probabilities in
    nats, before temperature and filters."""
    force: bool = False
    """Let --save-memory overwrite a memory; other files are never overwritten."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None:
            from memspan.lab.data.tokenizers.base import bytes_of

            # In an ASCII locale arguments are bytes behind surrogates.
            prompt = bytes_of(self.prompt).decode("utf-8", errors="surrogateescape")
            object.__setattr__(self, "prompt", prompt)
        filters = (self.sampling.top_k, self.sampling.top_p, self.sampling.min_p)
        if self.greedy and filters != (None, None, None):
            raise MemspanError(
                "--greedy always takes the likeliest token: drop it, or --top-k, --top-p and --min-p"
            )
        if self.force and self.save_memory is None:
            raise MemspanError(
                "--force has no effect without --save-memory: add that, or drop --force"
            )


GIVEN_ONCE = {
    "--prompt": "run it once for each",
    "--prompt-file": "join the files, as in: cat FILES | memspan generate RUN --prompt-file -",
    "--stop": "give all texts after one, as in --stop A B",
}
"""Options of which the parser would take the last -> the remedy."""


def generate(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    names = [each.partition("=")[0].replace("_", "-") for each in arguments]
    for name, remedy in GIVEN_ONCE.items():
        if names.count(name) > 1:
            raise MemspanError(f"{name} is given more than once: {remedy}")
    options = parsed(
        with_architectures(GenerateArguments, "reader_options"), arguments, "memspan generate"
    )
    # Before torch is imported, which takes seconds.
    load_config(options.run)
    announce(set_threads(options.threads))
    from memspan.memory import refuse_to_overwrite
    from memspan.native.waiting import sharing_cores

    if options.save_memory is not None:
        # Checked before hours of reading.
        refuse_to_overwrite(options.save_memory, memories=not options.force)
    if options.prompt is None and options.prompt_file is None and _is_piped():
        logging.getLogger("memspan").warning(
            "standard input is not read: add --prompt-file - to continue that text"
        )
    with sharing_cores():
        _generate(options)


def _generate(options: Any) -> None:
    from memspan.lab.generation.writer import Writer

    sampling = options.sampling
    with _opened(options.prompt_file) as file:
        run, precision = options.open_run()
        writer = Writer(
            run,
            _prompt(file, options.prompt) if options.prompt_file else options.prompt or "",
            sampling=dataclasses.replace(sampling, temperature=0) if options.greedy else sampling,
            log_probabilities=options.json,
            precision=precision,
            **options.keywords(
                "prompt", "prompt_file", "sampling", "greedy", "save_memory", "json", "force"
            ),
        )
    output_error = None
    try:
        _print(writer, options)
    except OSError as error:
        # The memory of a long text is worth saving even if the output is lost.
        output_error = error
    if options.save_memory is not None:
        memory = writer.memory.select([0])
        memory.save(options.save_memory, run.model.fingerprint())
        say(
            f"memory of {counted(int(memory.tokens_seen), 'token')} saved to {options.save_memory} "
            f"({memory.nbytes:,} bytes)",
            sys.stderr,
        )
    if output_error is not None:
        raise output_error


def _print(writer: Writer, options: GenerateArguments) -> None:
    """Print one sample while it is written; several, or JSON, at the end."""
    prompt = options.prompt or ""
    alone = not options.json and len(writer.texts) == 1
    if alone:
        print(prompt, end="", flush=True)
    # Ctrl-C keeps what was written so far, and its memory.
    with contextlib.suppress(KeyboardInterrupt):
        for pieces in writer:
            if alone:
                print(pieces[0], end="", flush=True)
    if options.json:
        columns = zip(writer.texts, writer.tokens, writer.log_probabilities or [], strict=True)
        names = ("text", "tokens", "log_probabilities")
        samples = [dict(zip(names, sample, strict=True)) for sample in columns]
        found = {"run": str(options.run), "prompt": prompt, "samples": samples}
        print(json.dumps(found), flush=True)
    elif alone:
        print(flush=True)
    else:
        for n, text in enumerate(writer.texts, 1):
            print(f"--- sample {n} ---\n{prompt}{text}", flush=True)


def _opened(path: Path | None) -> BinaryIO:
    """The file to read before the prompt: standard input for -, an empty one for None."""
    if path == Path("-"):
        if sys.stdin is None:
            raise MemspanError("standard input is closed: give a file with --prompt-file")
        return sys.stdin.buffer
    try:
        return open(path or os.devnull, "rb")
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check --prompt-file") from None


def _is_piped() -> bool:
    """True if standard input is a pipe with text in it."""
    try:
        file: Any = sys.stdin.buffer
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        return is_pipe and bool(select.select([file], [], [], 0)[0] and file.peek(1))
    # Closed, replaced by the caller's own, or on Windows.
    except (AttributeError, OSError, ValueError):
        return False


def _prompt(file: BinaryIO, prompt: str | None) -> Iterator[bytes]:
    """Yield the file's text, then the prompt."""
    from memspan.lab.data.encodings import encoding_hint
    from memspan.lab.data.tokenizers.base import bytes_of
    from memspan.lab.training.terminal import counting

    n_bytes = 0
    total = os.fstat(file.fileno()).st_size or None
    with counting("reading", "bytes") as show:
        while chunk := file.read(CHUNK):
            if not n_bytes and (hint := encoding_hint("the prompt", chunk)):
                logging.getLogger("memspan").warning(hint)
            yield chunk
            n_bytes += len(chunk)
            show(n_bytes, total)
    yield bytes_of(prompt or "")
