"""The command line: ``memspan VERB``. The verbs import torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import textwrap
import traceback

from memspan import __version__
from memspan.calls import nearest
from memspan.errors import MemspanError
from memspan.files.disk import remedy
from memspan.lab.commands.standard_streams import settle_output
from memspan.lab.distributed import reports
from memspan.lab.printing import say

USAGE = """\
memspan: models with memory, which read text of any length in constant memory

usage: memspan VERB [OPTIONS]        memspan VERB --help explains every option

  train              train a model; the defaults take minutes and no download
  evaluate RUN       score a text: bits per byte or character, perplexity
  generate RUN       continue a prompt or a saved memory
  measure TARGET ... measure how far back models remember
  check TARGET       test the laws of any model that carries state
  export RUN         merge checkpoints of several processes, or write the run
                     for another library: --to transformers DIR
  convert SOURCE OUT turn another library's checkpoint into a run
  data list          list the named corpora
  data prepare NAME  download and tokenise a corpus now

  --version          print the version, and say which C loops are used
  --debug            show the traceback of an error
"""

VERBS = ("train", "evaluate", "generate", "measure", "check", "export", "convert", "data")
"""Each is a function in the module of the same name in :mod:`memspan.lab.commands`."""


class _Notices(logging.Handler):
    """Writes to the standard error of the moment, which a live line of progress makes its own."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), sys.stderr)
        except Exception:
            self.handleError(record)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with status 2 after one line on a user's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write characters that the terminal's encoding does not have: é in ASCII is \xe9.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Warnings that belong beside the result.
    notices = _Notices()
    notices.setFormatter(logging.Formatter("memspan: %(message)s"))
    logging.getLogger("memspan").addHandler(notices)
    try:
        _dispatch([each for each in arguments if each != "--debug"])
        if sys.stdout is not None:
            sys.stdout.flush()
    except MemspanError as error:
        if debug:
            traceback.print_exc()
        _fail(f"memspan: {error}", 2, error)
    except KeyboardInterrupt:
        # The launcher of several processes prints this for all of them.
        if not reports.is_worker():
            print("\nmemspan: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`: not an error.
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
        logging.getLogger("memspan").removeHandler(notices)
        settle_output()


def _fail(line: str, status: int, error: Exception) -> None:
    """Exit with one line, even if several processes fail."""
    settle_output()
    if reports.is_worker():
        reports.leave(line, getattr(error, "status", status))
    with contextlib.suppress(OSError):
        say(line, sys.stderr)
    sys.exit(status)


def _refusal_of_the_system(error: Exception) -> str | None:
    """The message if the machine is at its limit, which is neither the user's fault nor memspan's."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}: {remedy(error)}, then try again"
    if isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "out of memory")
    ):
        return "not enough memory for these sizes: use a smaller model or batch"
    return None


def _dispatch(arguments: list[str]) -> None:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help"):
        from memspan.lab.runs.folder import SHIPPED

        names = textwrap.fill(", ".join(SHIPPED), 76, break_on_hyphens=False)
        print(f"{USAGE}\nRUN is a run's folder, or one of these included runs:")
        print(textwrap.indent(names, "  "))
    elif verb == "--version":
        from memspan.native.status import status

        print(f"memspan {__version__}\n{status()}")
    elif verb in VERBS:
        from memspan.lab.commands.parsing import import_modules

        import_modules(rest)
        getattr(importlib.import_module(f"memspan.lab.commands.{verb}"), verb)(rest)
    else:
        raise MemspanError(_unknown(verb))


def _unknown(verb: str) -> str:
    near = nearest(verb, [*VERBS, "--version", "--help", "--debug"])
    if near is not None:
        return f"unknown verb {verb!r}: perhaps {near} is meant"
    if verb.startswith("-"):
        return f"{verb} comes before the verb: write it after one, as in memspan train {verb}"
    return f"unknown verb {verb!r}: use {', '.join(VERBS[:-1])} or {VERBS[-1]}"
