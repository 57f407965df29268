"""The command line: ``memspan train | evaluate | generate | data``. Torch is imported by the verbs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Generic, Literal, TypeVar

import tyro

from memspan import __version__
from memspan.checks import MOST
from memspan.data.options import DataConfig
from memspan.distributed import reports
from memspan.errors import MemspanError
from memspan.models.registry import MODELS
from memspan.precision.options import MatmulPrecision, Products, refuse_contradictory_precision
from memspan.runs.config_files import (
    PRESETS,
    architecture_of,
    flags_from_toml,
    load_config,
    parsed,
    preset_file,
    read_config,
)
from memspan.runs.options import RunConfig
from memspan.sampling import Sampling

if TYPE_CHECKING:
    from memspan.precision.products import Precision
    from memspan.runs.run import Run

USAGE = """\
memspan: transformers with memory that read text of any length in constant memory

usage: memspan VERB [OPTIONS]        memspan VERB --help explains every option

  train              train a model; the defaults need no download and take minutes
  evaluate RUN       score a text: bits per byte or character, perplexity
  generate RUN       write on from a prompt or from a saved memory
  export RUN         make the checkpoints of several processes plain (train --nproc)
  data list          the named corpora
  data prepare NAME  fetch and tokenise a corpus now

  --version          print the version
  --debug            show the traceback of an error
"""

PROMPT_CHUNK = 1 << 14
"""Bytes of --prompt-file that are held at a time."""
M = TypeVar("M")


@dataclass(frozen=True)
class TrainArguments(Generic[M]):
    """Train a model on a text. Every run gets a folder with its options, weights and metrics."""

    config: Annotated[RunConfig[M], tyro.conf.arg(name="")]
    preset: Annotated[
        str | None,
        tyro.conf.arg(
            help=f"A preset, which flags override: {', '.join(PRESETS)}; or a TOML file of your own."
        ),
    ] = None
    out: Path | None = None
    """Run folder to write (None: a new one in runs/)."""
    init_from: Path | None = None
    """Start with the weights of this run where they fit, for instance a Feedback Transformer with
    those of a Transformer-XL of the same width; says which were taken."""
    resume: Path | None = None
    """Run folder to continue, bit for bit. Options of training and the optimiser that are given with it
    replace the run's from here on, such as --train.steps."""
    nproc: int = 1
    """Processes on this machine that share the batch's rows, which it must divide; also with --resume,
    where it may be another number than before. On several machines: torchrun -m memspan train."""


@dataclass(frozen=True)
class EvaluateArguments:
    """Score a text with a trained model: every token once, memory carried from start to end."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    corpus: str | None = None
    """A named corpus, file, folder or glob (None: the run's own)."""
    split: Literal["train", "validation", "test", "all"] = "validation"
    """Part of the corpus; all: the whole text in order."""
    batch_size: int = 1
    """Parallel streams. 1 is the exact protocol; more are faster and cut the text."""
    segment_length: int | None = None
    """Tokens read per step (None: as in training)."""
    memory_length: int | None = None
    """Slots of memory per layer, one per token (None: as in training)."""
    compressed_length: int | None = None
    """Compressed slots per layer, for models that have them (None: as in training)."""
    attention_span: Literal["segment", "fixed"] | None = None
    """What a token sees, for models with relative positions: all of memory and its segment's past, or
    exactly the memory's length (None: as in training)."""
    clamp_length: int | None = None
    """Distances over this share one position code, for the same models (None: as in training)."""
    tokens: int = 0
    """Score only the first so many tokens (0: all)."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Products = "auto"
    """Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is many times
    slower."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""
    json: bool = False
    """Print the scores as one JSON object."""


@dataclass(frozen=True)
class GenerateArguments:
    """Write on from a text. Reading and writing take constant memory, whatever the length."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    prompt: str | None = None
    """Text to write on from (None: a line break)."""
    prompt_file: Path | None = None
    """File whose text is read before the prompt, of any length; -: standard input."""
    tokens: int = 400
    """Tokens to write per sample (0: only read)."""
    samples: int = 1
    """Samples, written side by side from the same prompt."""
    temperature: float = 0.8
    """Divides the logits: lower is safer."""
    greedy: bool = False
    """Always take the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens (None: all)."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability (None: all)."""
    min_p: float | None = None
    """Draw from tokens at least this times as likely as the likeliest (None: all)."""
    seed: int | None = None
    """Seed of the draws (None: different each time)."""
    memory: Path | None = None
    """Start from this saved memory instead of an empty one."""
    save_memory: Path | None = None
    """Write the memory of all that was read and written here at the end (first sample's)."""
    force: bool = False
    """Let --save-memory overwrite a memory; other files are never overwritten."""
    attention_span: Literal["segment", "fixed"] | None = None
    """What a token sees, for models with relative positions: all of memory and its segment's past, or
    exactly the memory's length (None: as in training)."""
    clamp_length: int | None = None
    """Distances over this share one position code, for the same models (None: as in training)."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    precision: Products = "auto"
    """Precision of matrix products: auto is float32. On a CPU without AVX-512 bfloat16 is many times
    slower."""
    matmul_precision: MatmulPrecision = "auto"
    """How products of float32 are computed (auto: as in training). See memspan train --help."""


@dataclass(frozen=True)
class ExportArguments:
    """Turn the checkpoints of several processes into plain ones. A run that ends does so by itself."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder; nobody may be training in it."""


@dataclass(frozen=True)
class PrepareArguments:
    """Fetch a corpus into the cache and tokenise it."""

    corpus: Annotated[str, tyro.conf.Positional]
    """A named corpus, file, folder or glob."""
    tokenizer: Literal["bytes", "characters", "words", "subwords"] = "bytes"
    """What a token is."""
    vocab_size: int | None = None
    """Largest vocabulary, for words and subwords (None: words 300,000, subwords 8,192)."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with status 2 after one line on a user's mistake."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write characters that the terminal's encoding does not have.
        sys.stdout.reconfigure(errors="replace")
    try:
        _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except MemspanError as error:
        if debug:
            traceback.print_exc()
        _fail(f"memspan: {error}", 2, error)
    except KeyboardInterrupt:
        # Of several processes the launcher says so.
        if not reports.is_worker():
            print("\nmemspan: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`: not an error of ours.
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        if line := _refusal_of_the_system(error):
            _fail(f"memspan: {MemspanError(line)}", 2, error)
        reason = " ".join(str(error).split()) or type(error).__name__
        _fail(
            f"memspan: unexpected {type(error).__name__}: {reason}; run again with --debug for the "
            "traceback, and please report it",
            1,
            error,
        )
    finally:
        _settle_output()


def _settle_output() -> None:
    """Drop what cannot be written, which the interpreter would complain about as it exits."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(line: str, status: int, error: Exception) -> None:
    """End with one line, also where several processes fail."""
    _settle_output()
    if reports.is_worker():
        reports.leave(line, getattr(error, "status", status))
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
    sys.exit(status)


def _refusal_of_the_system(error: Exception) -> str | None:
    """What to tell where the machine, and neither the user nor memspan, sets the limit."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}: free some space or check the permissions, then try again"
    if isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory")
    ):
        return "the machine's memory is too small for these sizes: lower the model's or the batch's"
    return None


def _dispatch(arguments: list[str]) -> None:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help"):
        print(USAGE, end="")
    elif verb == "--version":
        print(f"memspan {__version__}")
    elif verb == "data":
        _data(rest)
    elif verb in VERBS:
        VERBS[verb](rest)
    else:
        raise MemspanError(f"unknown verb {verb!r}: use train, evaluate, generate, export or data")


def _train(arguments: list[str]) -> None:
    changed = _changes_options(arguments)
    arguments = _with_run(arguments) if changed else _with_preset(arguments)
    architecture = MODELS[architecture_of(arguments)]
    kind: Any = TrainArguments[architecture]  # type: ignore[valid-type]
    options = parsed(kind, arguments, "memspan train")
    shared = _without(arguments, "--nproc")
    _at_least(1, nproc=options.nproc)
    if options.out == Path():
        raise MemspanError("--out names the current folder: give a folder for this run alone")
    if options.nproc > 1:
        _launch(shared, options.nproc)
        return
    if reports.is_worker():
        # DDP would say that looking for unused parameters may be left out; for some options it may not.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rich.console import Console

    from memspan.training.terminal import unbreakable_output

    with contextlib.ExitStack() as stack:
        stack.enter_context(unbreakable_output())
        if os.environ.get("RANK", "0") == "0":
            # PyTorch takes seconds to import, and a text that is not in the cache longer.
            what = options.config.data.corpus if options.resume is None else options.resume
            print(f"preparing {what}", flush=True)
        from memspan.distributed.processes import joined
        from memspan.training import start

        processes = stack.enter_context(joined())
        # Names of corpora and folders may hold brackets, which are no mark-up. Lines are broken by the
        # terminal, so that files and pipes hold them whole.
        console = Console(quiet=not processes.first, markup=False, soft_wrap=True)
        if options.resume is not None:
            wanted = options.config if changed else None
            start.resume(options.resume, config=wanted, console=console, processes=processes)
        else:
            folder = processes.of_first(options.out or _new_folder(options.config))
            start.train(
                options.config,
                folder,
                init_from=options.init_from,
                console=console,
                processes=processes,
            )
    _settle_output()


def _launch(arguments: list[str], n_processes: int) -> None:
    if reports.is_worker():
        raise MemspanError(
            "--nproc starts processes, and torchrun has started some already: drop one of them"
        )
    from memspan.distributed.launch import RunEndedError, launch

    try:
        launch(["train", *arguments], n_processes)
    except RunEndedError as error:
        print(error.line, file=sys.stderr)
        sys.exit(error.status)


def _value_of(arguments: list[str], name: str) -> str | None:
    """The value of the flag ``name``, the last where there are several."""
    found = None
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            found = arguments[i + 1]
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found


def _changes_options(arguments: list[str]) -> bool:
    """Whether a run is to be resumed with other options than its own."""
    if _value_of(arguments, "--resume") is None:
        return False
    return bool(_without(_without(arguments, "--resume"), "--nproc"))


def _with_run(arguments: list[str]) -> list[str]:
    """Put the options of the run that is resumed, as flags, before the user's, which then win."""
    for name in ("--preset", "--out", "--init-from"):
        if _value_of(arguments, name) is not None:
            raise MemspanError(
                f"--resume continues a run in its own folder: drop {name}, or start a new run without "
                "--resume"
            )
    folder = _value_of(arguments, "--resume")
    path = Path(folder or "") / "config.toml"
    if not path.is_file():
        # What is wrong there is said where the run is loaded.
        return arguments
    read_config(path)
    flags = flags_from_toml(path)
    theirs, ours = architecture_of(flags), architecture_of(arguments, default="")
    if ours and theirs != ours:
        raise MemspanError(f"{folder} is a {theirs}: drop --model {ours}, or start a new run")
    return flags + arguments


def _without(arguments: list[str], name: str) -> list[str]:
    """The arguments but for the flag ``name`` and its value."""
    left, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(f"{name}="):
            skip = argument == name
            if not skip:
                left.append(argument)
        else:
            skip = False
    return left


def _export(arguments: list[str]) -> None:
    options = parsed(ExportArguments, arguments, "memspan export")
    load_config(options.run)
    from memspan.runs import checkpoints
    from memspan.runs.claim import claim

    with claim(options.run):
        steps = checkpoints.export(options.run)
    what = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "nothing to turn"
    print(f"{options.run}: {what}; best weights in {options.run / 'model.safetensors'}")


def _with_preset(arguments: list[str]) -> list[str]:
    """Put the preset's values, as flags, before the user's, which then win."""
    for i, flag in enumerate(arguments):
        name = None
        if flag == "--preset" and i + 1 < len(arguments):
            name = arguments[i + 1]
        elif flag.startswith("--preset="):
            name = flag.removeprefix("--preset=")
        if name is not None:
            flags = flags_from_toml(preset_file(name))
            theirs, ours = (architecture_of(given, default="") for given in (flags, arguments))
            if theirs and ours and theirs != ours:
                raise MemspanError(
                    f"the preset {name} is for {theirs}: drop --model {ours}, or the preset"
                )
            return flags + arguments
    return arguments


def _new_folder(config: RunConfig[Any]) -> Path:
    # The last part of the path that has letters in it: of a glob, often the folder.
    parts = [Path(part).stem for part in reversed(Path(config.data.corpus).parts)]
    names = [re.sub(r"[^\w-]+", "-", part).strip("-")[:60] for part in parts]
    corpus = next(filter(None, names), "text")
    number = 1
    while (folder := Path("runs") / f"{config.architecture}-{corpus}-{number}").exists():
        number += 1
    return folder


def _evaluate(arguments: list[str]) -> None:
    options = parsed(EvaluateArguments, arguments, "memspan evaluate")
    _at_least(1, batch_size=options.batch_size, segment_length=options.segment_length)
    _at_least(0, memory_length=options.memory_length, tokens=options.tokens)
    _at_least(0, compressed_length=options.compressed_length)
    _at_least(1, clamp_length=options.clamp_length)
    refuse_contradictory_precision(options.precision, options.matmul_precision)
    from memspan.data.corpora import is_there
    from memspan.data.identity import difference, identity, is_whole
    from memspan.data.prepared import prepare
    from memspan.data.tokenizers import load_tokenizer

    # The text first: a name that is wrong is found before a model is built.
    data = load_config(options.run).data
    corpus = options.corpus or data.corpus
    if not is_there(corpus) and options.corpus is None:
        raise MemspanError(
            f"the corpus of {options.run} is not at {corpus}: say where it is with --corpus PATH"
        )
    prepared = prepare(
        corpus,
        data.tokenizer,
        data.vocab_size,
        with_tokenizer=load_tokenizer(options.run),
    )
    _notify(prepared.notices())
    import numpy as np

    from memspan.evaluation import percent, score_tokens
    from memspan.training.terminal import counting

    run = _load(options.run, options.device)
    precision = _precision(options, run)

    if options.split == "all":
        splits = list(prepared.splits.values())
        tokens = np.concatenate([split.tokens for split in splits])
        before = np.cumsum([0, *(len(split.tokens) for split in splits[:-1])])
        starts = np.concatenate(
            [split.document_starts + n for split, n in zip(splits, before, strict=True)]
        )
    elif options.split not in prepared.splits:
        raise MemspanError(
            f"{corpus} has no split {options.split}: use {', '.join(prepared.splits)} or all"
        )
    else:
        tokens = prepared.splits[options.split].tokens
        starts = prepared.splits[options.split].document_starts
    among = None if options.split == "all" else [options.split]
    how = None
    if is_whole(run.corpus):
        how = difference(run.corpus, identity(prepared.splits), among)
    if how and options.corpus is None:
        print(
            f"memspan: {corpus} has changed since {options.run} was trained on it ({how}): the "
            "score is not comparable with earlier ones, and what is scored may be text that was "
            "trained on",
            file=sys.stderr,
        )
    tokens = tokens[: options.tokens or None]
    segment_length = options.segment_length or min(
        run.config.train.segment_length, max(len(tokens) // options.batch_size, 1)
    )
    sizes = {"memory_length": options.memory_length, "compressed_length": options.compressed_length}
    with counting("scoring", "tokens", len(tokens)) as show:
        scores = score_tokens(
            run.model,
            tokens,
            run.tokenizer,
            document_starts=starts if data.document_reset else None,
            batch_size=options.batch_size,
            segment_length=segment_length,
            memory={name: size for name, size in sizes.items() if size is not None},
            reading=_reading(options),
            precision=precision,
            progress=show,
        )
    if options.json:
        scored = {
            "run": str(options.run),
            "corpus": corpus,
            "split": options.split,
            "as_in_training": how is None if is_whole(run.corpus) else None,
            "precision": precision.products,
            "matmul_precision": precision.matmul,
        }
        print(json.dumps(scores.as_dict() | scored))
        return
    for name in sizes:
        sizes[name] = getattr(run.config.model, name, None) if sizes[name] is None else sizes[name]
    memory = "".join(
        f", {name.replace('_length', '')} {size}"
        for name, size in sizes.items()
        if size is not None
    )
    memory += "".join(f", {name.replace('_', ' ')} {v}" for name, v in scores.reading.items())
    if (precision.products, precision.matmul) != ("float32", "highest"):
        memory += f", {precision}"
    one = "every document by itself" if data.document_reset else "memory carried from start to end"
    streams = (
        f"one stream, {one} (exact)"
        if options.batch_size == 1
        else f"{options.batch_size} streams: the text is cut, each part starts with empty memory"
    )
    print(f"{options.run}  {corpus}, {options.split}: {scores.tokens:,} tokens, {streams}")
    print(f"segment {segment_length}{memory or ', memory of constant size'}")
    if scores.n_unknown:
        print(f"  unknown tokens       {scores.n_unknown:10,} ({percent(scores.unknown_share)})")
        print("  no bits per byte or character: the text of unknown tokens is not scored")
    else:
        print(f"  bits per byte        {scores.bits_per_byte:10.4f}")
        print(f"  bits per character   {scores.bits_per_character:10.4f}")
    print(f"  nats per token       {scores.nats_per_token:10.4f}")
    print(f"  perplexity per token {scores.perplexity:10.2f}")
    if run.tokenizer.kind in ("words", "subwords"):
        # Of bytes or characters it is a number of seven digits that nobody reports.
        print(f"  perplexity per word  {scores.word_perplexity:10.2f}")
    print(f"  {scores.seconds:.1f} s, {scores.tokens_per_second:,.0f} tokens/s")


def _notify(lines: list[str]) -> None:
    """Say what the user should know beside the result."""
    for line in lines:
        print(f"memspan: {line}", file=sys.stderr)


def _reading(options: EvaluateArguments | GenerateArguments) -> dict[str, Any]:
    """How the model is read where that differs from training, for :meth:`LanguageModel.reader`."""
    chosen = {"attention_span": options.attention_span, "clamp_length": options.clamp_length}
    return {name: value for name, value in chosen.items() if value is not None}


def _precision(options: EvaluateArguments | GenerateArguments, run: Run) -> Precision:
    """In which a run is read; what there is to know about that is said."""
    from memspan.precision.products import Precision, resolve

    trained: Any = run.config.train.matmul_precision
    auto = Precision(matmul="highest" if trained == "auto" else trained)
    device = next(run.model.parameters()).device
    precision = resolve(options.precision, options.matmul_precision, auto, device)
    _notify(precision.notices(device, run.model.float32_part()))
    return precision


def _generate(arguments: list[str]) -> None:
    options = parsed(GenerateArguments, arguments, "memspan generate")
    _at_least(1, samples=options.samples, clamp_length=options.clamp_length)
    _at_least(0, tokens=options.tokens)
    if options.greedy and (options.top_k, options.top_p, options.min_p) != (None, None, None):
        raise MemspanError(
            "--greedy always takes the likeliest token: drop it, or --top-k, --top-p and --min-p"
        )
    refuse_contradictory_precision(options.precision, options.matmul_precision)
    sampling = Sampling(
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
    load_config(options.run)
    # Torch, which takes seconds to import, only now.
    from memspan.generation import draw_tokens, read_prompt
    from memspan.memory import refuse_to_overwrite
    from memspan.models.sizes import refuse_oversized

    if options.save_memory is not None:
        # Before hours of reading.
        refuse_to_overwrite(options.save_memory, memories=not options.force)
    elif options.force:
        raise MemspanError("--force belongs to --save-memory: drop it, or add that")
    with _opened(options.prompt_file) as file:
        run = _load(options.run, options.device)
        reading = _reading(options) | {"precision": _precision(options, run)}
        model, tokenizer, rows = run.model, run.tokenizer, options.samples
        memory = model.initial_memory(1)
        device = memory.tokens_seen.device
        refuse_oversized(
            f"the memories of {rows:,} samples", rows * memory.nbytes, device, "lower --samples"
        )
        fingerprint = model.fingerprint() if options.memory or options.save_memory else ""
        if options.memory is not None:
            memory = type(memory).load(options.memory, fingerprint, like=memory).to(device)
        reader = model.reader(memory, **reading)
        text = tokenizer.encode_stream(_prompt(file, options.prompt))
        logits = read_prompt(reader, text).expand(rows, -1)
    # The prompt is read once; the samples go on from there, each in a row of its own.
    reader = model.reader(reader.memory.select([0] * rows), **reading)
    decoders = [tokenizer.stream_decoder() for _ in range(rows)]
    written = [""] * rows
    output_error = None
    try:
        if options.prompt is not None and rows == 1:
            print(options.prompt, end="", flush=True)
        # Ctrl-C, too, leaves a result: what was written so far, and its memory.
        with contextlib.suppress(KeyboardInterrupt):
            for ids in draw_tokens(reader, logits, options.tokens, sampling):
                pieces = [d.push(i) for d, i in zip(decoders, ids, strict=True)]
                written = [w + p for w, p in zip(written, pieces, strict=True)]
                if rows == 1:
                    print(pieces[0], end="", flush=True)
        if rows == 1:
            print(flush=True)
        else:
            for n, sample in enumerate(written, 1):
                print(f"--- sample {n} ---\n{options.prompt or ''}{sample}", flush=True)
    except OSError as error:
        # The memory of a long text is worth saving, whoever reads the output.
        output_error = error
    if options.save_memory is not None:
        saved = reader.memory.select([0])
        saved.save(options.save_memory, fingerprint)
        print(
            f"memory of {int(saved.tokens_seen):,} tokens saved to {options.save_memory} "
            f"({saved.nbytes:,} bytes)",
            file=sys.stderr,
        )
    if output_error is not None:
        raise output_error


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


def _prompt(file: BinaryIO, prompt: str | None) -> Iterator[bytes]:
    """The file's text and the prompt, in chunks; a line break if both are empty."""
    from memspan.data.prepared import encoding_hint
    from memspan.data.texts import encoding_of
    from memspan.training.terminal import counting

    n_bytes = 0
    with counting("reading", "bytes", os.fstat(file.fileno()).st_size or None) as show:
        while chunk := file.read(PROMPT_CHUNK):
            if not n_bytes and (encoding := encoding_of(chunk)):
                _notify([encoding_hint("the prompt", encoding)])
            yield chunk
            n_bytes += len(chunk)
            show(n_bytes)
    if prompt or not n_bytes:
        yield (prompt or "\n").encode("utf-8", errors="surrogateescape")


def _data(arguments: list[str]) -> None:
    usage = "usage: memspan data list | memspan data prepare CORPUS [OPTIONS]"
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help"):
        print(f"{usage}\n\n  list     the named corpora\n  prepare  fetch and tokenise one now")
    elif verb == "list":
        if rest in (["-h"], ["--help"]):
            print(
                "usage: memspan data list [--json]\n\n"
                "Prints the named corpora, their sizes and splits."
            )
            return
        if rest not in ([], ["--json"]):
            raise MemspanError(f"data list takes no option but --json, not {' '.join(rest)!r}")
        from memspan.data.corpora import list_corpora

        rows = list_corpora()
        if rest:
            print(json.dumps([asdict(row) for row in rows]))
        else:
            print(*rows, sep="\n")
    elif verb == "prepare":
        options = parsed(PrepareArguments, rest, "memspan data prepare")
        from memspan.data.prepared import prepare

        data = DataConfig(options.corpus, options.tokenizer, options.vocab_size)
        prepared = prepare(data.corpus, data.tokenizer, data.vocab_size)
        _notify(prepared.notices())
        for name, split in prepared.splits.items():
            print(f"{name:<10} {len(split.tokens):>13,} tokens  {split.n_bytes:>13,} bytes")
    else:
        raise MemspanError(f"unknown verb 'data {verb}'; {usage}")


def _load(folder: Path, device: str) -> Run:
    from memspan.runs.run import load
    from memspan.training.start import device_for

    return load(folder, str(device_for(device)))


def _at_least(low: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < low:
            raise MemspanError(f"--{name.replace('_', '-')} must be at least {low}, not {value}")
        if value is not None and value > MOST:
            raise MemspanError(f"--{name.replace('_', '-')} must be at most 2^63 - 1")


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
    "export": _export,
}
