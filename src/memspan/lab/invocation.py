"""The command that calls ``memspan`` here, for messages that name the next one to run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

PROGRAM = "MEMSPAN_PROGRAM"
"""Set by our launcher for the processes that it starts: the command that started the launcher."""


def command(*arguments: object, columns: int | None = None) -> str:
    """``memspan`` with ``arguments``, quoted, as a shell in this folder runs it.

    Args:
        arguments: the verb, its options and their values.
        columns: the width of a line; a longer command goes on after a backslash (None: any width).
    """
    lines = [program()]
    for word in (shlex.quote(str(argument)) for argument in arguments):
        if columns is not None and len(f"{lines[-1]} {word} \\") > columns:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def program() -> str:
    """``memspan`` as this process was started, or could be."""
    if PROGRAM in os.environ:
        return os.environ[PROGRAM]
    # Text, not a path, which would lose the ./ of ./memspan.
    script = sys.argv[0]
    if Path(script) == Path(__file__).parents[1] / "__main__.py":
        return f"{shlex.quote(sys.orig_argv[0])} -m memspan"
    if Path(script).stem != "memspan":
        # Called from Python: the script that was installed beside it.
        script = os.path.join(sysconfig.get_path("scripts"), "memspan")
    if os.path.exists(script):
        on_path = shutil.which("memspan")
        named = on_path is not None and os.path.samefile(on_path, script)
        return "memspan" if named else shlex.quote(script)
    return f"{shlex.quote(sys.executable)} -m memspan"
