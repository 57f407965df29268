"""The named corpora: where they come from, and their official splits."""

from __future__ import annotations

import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from memspan.lab.data.download import Source
from memspan.lab.data.recall import recall_splits
from memspan.lab.data.texts import Splits, Text, by_file, by_position


@dataclass(frozen=True)
class Named:
    """A named corpus."""

    about: str
    read: Callable[[], Splits]
    source: Source | None = None
    splits: tuple[str, ...] = ("train", "validation", "test")


SHAKESPEARE = Source(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    2_000_000,
)

ENWIK8 = Source(
    "http://mattmahoney.net/dc/enwik8.zip",
    "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    100_000_000,
)

TEXT8 = Source(
    "http://mattmahoney.net/dc/text8.zip",
    "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    100_000_000,
)

WIKITEXT_103 = Source(
    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
    "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    600_000_000,
)

HELD_OUT = Path(str(resources.files("memspan.lab") / "trained" / "tiny-shakespeare-held-out.txt"))
"""The last tenth of Tiny Shakespeare."""


def _python_stdlib() -> Splits:
    """The standard library's sources, sorted by path, tests excluded, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(
        (p.relative_to(root).as_posix(), p)
        for p in root.rglob("*.py")
        if not excluded & set(p.relative_to(root).parts)
    )
    # Each file's split depends only on its own name: a new file moves no other.
    return by_file([(name, [Text.of(path)]) for name, path in files])


def _tiny_shakespeare() -> Splits:
    text = Text.of(SHAKESPEARE.fetch())
    cut = len(text) * 9 // 10
    return {"train": [text.part(0, cut)], "validation": [text.part(cut, len(text))]}


def _hundred_million(source: Source) -> Splits:
    text = Text.of(_member(source, source.path.stem))
    edges = (0, 90_000_000, 95_000_000, len(text))
    names = ("train", "validation", "test")
    return {name: [text.part(edges[n], edges[n + 1])] for n, name in enumerate(names)}


def _wikitext_103() -> Splits:
    names = {"train": "train", "validation": "valid", "test": "test"}
    return {
        split: [Text.of(_member(WIKITEXT_103, f"wikitext-103/wiki.{name}.tokens"))]
        for split, name in names.items()
    }


def _member(source: Source, name: str) -> bytes:
    """Read a file in an archive, and verify its checksum."""
    with zipfile.ZipFile(source.fetch()) as archive:
        return archive.read(name)


CORPORA = {
    "two-plays": Named(
        "112 KB of Shakespeare that come with memspan (the default): that last tenth, for a first run",
        lambda: by_position([Text.of(HELD_OUT)]),
    ),
    "python-stdlib": Named(
        "the Python standard library's own sources, about 12 MB", _python_stdlib
    ),
    "recall": Named(
        "3.5 MB of who is where, made up, with questions and answers: for --data.tokenizer words",
        recall_splits,
    ),
    "tiny-shakespeare": Named(
        "1.1 MB of plays, last tenth for validation",
        _tiny_shakespeare,
        SHAKESPEARE,
        ("train", "validation"),
    ),
    "tiny-shakespeare-held-out": Named(
        "its last tenth, 112 KB, which comes with memspan: for scoring its runs, not for training",
        lambda: {"validation": [Text.of(HELD_OUT)]},
        splits=("validation",),
    ),
    "enwik8": Named(
        "100 MB of Wikipedia with mark-up, 90M/5M/5M bytes",
        lambda: _hundred_million(ENWIK8),
        ENWIK8,
    ),
    "text8": Named(
        "100 MB of Wikipedia as a-z and space, 90M/5M/5M",
        lambda: _hundred_million(TEXT8),
        TEXT8,
    ),
    "wikitext-103": Named(
        "103M words of Wikipedia articles, tokenised; official splits", _wikitext_103, WIKITEXT_103
    ),
}


def list_corpora() -> list[dict[str, Any]]:
    """The named corpora as ``memspan data list`` shows them: ``name``, ``about``, ``splits``, and
    ``state``, which says where it is or how to get it."""
    rows = []
    for name, corpus in CORPORA.items():
        source = corpus.source
        state = "no download needed"
        if source is not None and source.path.exists():
            state = f"downloaded: {source.path}"
        elif source is not None:
            state = f"downloaded on first use, or put {source.url} at {source.path}"
        rows.append({"name": name, "about": corpus.about, "splits": corpus.splits, "state": state})
    return rows
