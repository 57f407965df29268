"""``memspan convert``: make a run from someone else's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memspan.lab.commands.parsing import parsed
from memspan.lab.converters.kinds import KIND_HELP, KindName, kind_of
from memspan.lab.invocation import command


@dataclass(frozen=True)
class ConvertArguments:
    """Make a run from someone else's checkpoint, to evaluate, generate, measure and train further."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the checkpoint."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Run folder to write."""
    kind: Annotated[KindName | None, tyro.conf.arg(name="from", help=KIND_HELP)] = None


def convert(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    options = parsed(ConvertArguments, arguments, "memspan convert")
    # Fails before torch is imported.
    kind_of(options.source, options.kind)
    import memspan

    folder = memspan.convert(options.source, options.out, kind=options.kind)
    run = memspan.load(folder)
    size = sum(parameter.numel() for parameter in run.model.parameters())
    print(
        f"{folder}: {run.config.architecture}, {size:,} parameters, {run.tokenizer.vocab_size:,} "
        f"{run.tokenizer.kind}; {command('evaluate', folder)} reads {run.config.data.corpus} unless "
        "--corpus names another text"
    )
