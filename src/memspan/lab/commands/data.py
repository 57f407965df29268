"""``memspan data``: list the named corpora, or prepare one."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Annotated

import tyro

from memspan.calls import nearest
from memspan.errors import MemspanError
from memspan.lab.commands.parsing import parsed
from memspan.lab.data.options import DataConfig
from memspan.lab.printing import say

USAGE = """\
List the named corpora, or download and tokenise one before it is needed.

usage: memspan data list [--json]
       memspan data prepare CORPUS [OPTIONS]

  list     print the named corpora: size, splits, where each is or comes from
  prepare  put a corpus and its tokens into the cache, and print the number of
           tokens in each split; training with the same tokeniser then starts
           at once. CORPUS is a named corpus; a file, a folder or a quoted glob
           of text, JSON Lines, CSV or Parquet; or hf:NAME, a data set on the
           hub

options of prepare; memspan data prepare --help explains each:

  --train TEXT [--validation TEXT] [--test TEXT]
                   a text for each split, instead of CORPUS
  --tokenizer bytes|characters|words|subwords|PATH
                   unit of text that is a token
  --vocab-size N   largest vocabulary, for words and subwords
  --field NAME     the field or column with a record's text

  memspan data prepare tiny-shakespeare
  memspan data prepare stories.csv --field body
  memspan data prepare --train 'train/*.txt' --validation validation.txt
  memspan data prepare 'books/*.txt' --tokenizer subwords --vocab-size 4096
"""


@dataclass(frozen=True)
class ListArguments:
    """Print the named corpora, their sizes and splits."""

    json: bool = False
    """Print one JSON list."""


CORPUS_HELP = (
    "A named corpus, file, folder or glob, or hf:NAME; see --data.corpus of memspan train."
)


@dataclass(frozen=True)
class PrepareArguments(DataConfig):
    """Download a corpus into the cache and tokenise it."""

    corpus: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(help=CORPUS_HELP)] = None
    document_reset: tyro.conf.Suppress[bool] = False

    def __post_init__(self) -> None:
        if self.corpus is None and self.train is None:
            raise MemspanError("corpus is missing: name one, or a text with --train")
        super().__post_init__()


def data(arguments: list[str]) -> None:
    """Run the verb with ``arguments``."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if verb in ("-h", "--help"):
        print(USAGE, end="")
    elif verb == "list":
        _list(parsed(ListArguments, rest, "memspan data list"))
    elif verb == "prepare":
        _prepare(parsed(PrepareArguments, rest, "memspan data prepare"))
    else:
        near = nearest(verb, ["list", "prepare"])
        remedy = f"perhaps data {near} is meant" if near else "use data list or data prepare"
        raise MemspanError(f"unknown verb 'data {verb}': {remedy}")


def _list(options: ListArguments) -> None:
    from memspan.lab.data.named import list_corpora

    rows = list_corpora()
    if options.json:
        print(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        say(f"{row['name']:<{width}}  {row['about']}")
        say(f"{'':<{width}}  {', '.join(row['splits'])}\n{'':<{width}}  {row['state']}")


def _prepare(config: PrepareArguments) -> None:
    from memspan.lab.data.prepared import prepare

    prepared = prepare(config.texts, config.tokenizer, config.vocab_size, field=config.field)
    for line in prepared.notices():
        logging.getLogger("memspan").warning(line)
    for name, split in prepared.splits.items():
        print(f"{name:<10} {len(split.tokens):>13,} tokens  {split.n_bytes:>13,} bytes")
