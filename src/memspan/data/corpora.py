"""Corpora: named ones with their official splits, data sets, or any file, folder or glob."""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from memspan.data import hugging_face
from memspan.data.download import fetch, read_member
from memspan.data.texts import Text, encoding_of
from memspan.data.unpacked import documents_in, holds_records
from memspan.errors import MemspanError
from memspan.files.cache import cache_folder

Splits = dict[str, list[Text]]
"""Split name -> documents."""


@dataclass(frozen=True)
class Skipped:
    """A file of a folder or glob that is left out of the text."""

    name: str
    """Relative to the folder."""
    reason: str
    """Such as ``empty``, ``not text`` or ``UTF-16, not UTF-8``."""


@dataclass(frozen=True)
class Corpus:
    """A text, divided into splits of documents."""

    name: str
    splits: Splits
    record: dict[str, Any] = field(default_factory=dict)
    """Its name, source and SHA-256."""
    skipped: tuple[Skipped, ...] = ()
    """Files of a folder or glob that are left out."""
    encoding: str | None = None
    """What the text seems to be if it is not UTF-8: only the tokeniser of bytes can encode it."""


@dataclass(frozen=True)
class Source:
    """A file on the network."""

    url: str
    sha256: str
    limit: int
    """Maximum size in bytes, of the file and of what an archive holds."""

    @property
    def path(self) -> Path:
        """Where it is in the cache."""
        return cache_folder() / "downloads" / self.url.rsplit("/", 1)[1]

    def fetch(self) -> Path:
        """Download it unless it is there; its path."""
        return fetch(self.url, self.path, self.sha256, self.limit)


@dataclass(frozen=True)
class Named:
    """A named corpus."""

    about: str
    read: Callable[[], Splits]
    source: Source | None = None
    splits: tuple[str, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class CorpusRow:
    """A named corpus as ``memspan data list`` shows it."""

    name: str
    about: str
    splits: tuple[str, ...]
    state: str
    """Where it is, or how to get it."""

    def __str__(self) -> str:
        width = max(map(len, CORPORA))
        return (
            f"{self.name:<{width}}  {self.about}\n{'':<{width}}  {', '.join(self.splits)}\n"
            f"{'':<{width}}  {self.state}"
        )


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

HELD_OUT = Path(
    str(resources.files("memspan").joinpath("trained", "tiny-shakespeare-held-out.txt"))
)
"""The last tenth of Tiny Shakespeare."""


def load_corpus(name: str, field: str = "text") -> Corpus:
    """The corpus of that name, or the text at that path.

    Args:
        name: one of :data:`CORPORA`; a file, folder or glob; ``hf:NAME``, a data set on Hugging Face's
            hub.
        field: the field or column that holds the text, in JSON Lines, Parquet and data sets.

    Raises:
        MemspanError: no such name or path; an empty, missing or damaged file; a folder without text; a
            download that fails; records without the field; a package that is not installed.
    """
    if name in CORPORA:
        try:
            splits = CORPORA[name].read()
        except OSError as error:
            raise MemspanError(
                f"cannot read {error.filename or name} ({error.strerror}): check its permissions"
            ) from None
        source = CORPORA[name].source
        record = {"url": source.url} if source else {"python": platform.python_version()}
        skipped: list[Skipped] = []
    else:
        splits, skipped = _read_path(name, field)
        record = {}
    first = next((text for documents in splits.values() for text in documents if len(text)), None)
    return Corpus(
        name,
        splits,
        record | {"name": name, "sha256": digest(splits)},
        tuple(skipped),
        encoding_of(_start(first)) if first else None,
    )


def digest(splits: Splits) -> str:
    """SHA-256 of a text, its splits and documents."""
    sums = hashlib.sha256()
    for split, documents in splits.items():
        sums.update(f"{split} {len(documents)};".encode())
        for document in documents:
            sums.update(f"{len(document)};".encode())
            for chunk in document.chunks():
                sums.update(chunk)
    return sums.hexdigest()


def located(name: str) -> str:
    """A file, folder or glob as an absolute path; anything else unchanged."""
    if name in CORPORA or name.startswith(hugging_face.PREFIX) or not is_there(name):
        return name
    return os.path.abspath(os.path.expanduser(name))


def is_there(name: str) -> bool:
    """Whether there is a corpus of that name, or a file at that path; the hub is not asked."""
    path = os.path.expanduser(name)
    if name in CORPORA or name.startswith(hugging_face.PREFIX):
        return True
    return os.path.exists(path) or bool(glob.glob(path, recursive=True))


def list_corpora() -> list[CorpusRow]:
    """A row per named corpus."""
    rows = []
    for name, corpus in CORPORA.items():
        source = corpus.source
        if source is None:
            state = "no download needed"
        elif source.path.exists():
            state = f"downloaded: {source.path}"
        else:
            state = f"downloaded on first use, or put {source.url} at {source.path}"
        rows.append(CorpusRow(name, corpus.about, corpus.splits, state))
    return rows


def _python_stdlib() -> Splits:
    """The standard library's sources, sorted by path, tests excluded, split by file."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(
        (p.relative_to(root).as_posix(), p)
        for p in root.rglob("*.py")
        if not excluded & set(p.relative_to(root).parts)
    )
    if not files:
        raise MemspanError(
            f"this Python has no library sources in {root}: give a text with --data.corpus FILE"
        )
    # Each file's split depends only on its own name: a new file moves no other.
    return _by_file([(name, [Text.of(path)]) for name, path in files])


def _tiny_shakespeare() -> Splits:
    text = Text.of(SHAKESPEARE.fetch())
    cut = len(text) * 9 // 10
    return {"train": [text.part(0, cut)], "validation": [text.part(cut, len(text))]}


def _hundred_million(source: Source, member: str) -> Splits:
    text = Text.of(read_member(source.fetch(), member, source.limit))
    edges = (0, 90_000_000, 95_000_000, len(text))
    names = ("train", "validation", "test")
    return {name: [text.part(edges[n], edges[n + 1])] for n, name in enumerate(names)}


def _wikitext_103() -> Splits:
    archive = WIKITEXT_103.fetch()
    names = {"train": "train", "validation": "valid", "test": "test"}
    return {
        split: [
            Text.of(read_member(archive, f"wikitext-103/wiki.{name}.tokens", WIKITEXT_103.limit))
        ]
        for split, name in names.items()
    }


def _held_out() -> Splits:
    return {"validation": [Text.of(HELD_OUT)]}


def _two_plays() -> Splits:
    return _by_position([Text.of(HELD_OUT)])


CORPORA = {
    "two-plays": Named(
        "112 KB of Shakespeare that come with memspan (the default): that last tenth, for a first run",
        _two_plays,
    ),
    "python-stdlib": Named(
        "the Python standard library's own sources, about 12 MB", _python_stdlib
    ),
    "tiny-shakespeare": Named(
        "1.1 MB of plays, last tenth for validation",
        _tiny_shakespeare,
        SHAKESPEARE,
        ("train", "validation"),
    ),
    "tiny-shakespeare-held-out": Named(
        "its last tenth, 112 KB, which comes with memspan: for scoring its runs, not for training",
        _held_out,
        splits=("validation",),
    ),
    "enwik8": Named(
        "100 MB of Wikipedia with mark-up, 90M/5M/5M bytes",
        lambda: _hundred_million(ENWIK8, "enwik8"),
        ENWIK8,
    ),
    "text8": Named(
        "100 MB of Wikipedia as a-z and space, 90M/5M/5M",
        lambda: _hundred_million(TEXT8, "text8"),
        TEXT8,
    ),
    "wikitext-103": Named(
        "103M words of Wikipedia articles, tokenised; official splits", _wikitext_103, WIKITEXT_103
    ),
}


def _read_path(name: str, field: str) -> tuple[Splits, list[Skipped]]:
    if not name:
        # Path("") would be the current folder.
        raise MemspanError("no corpus is named: give a name, a file, a folder or a glob")
    # Not Path.expanduser, which raises for an unknown user.
    path = Path(os.path.expanduser(name))
    if name.startswith(hugging_face.PREFIX):
        return _of_dataset(name, field)
    try:
        if hugging_face.is_saved(path):
            return _of_dataset(str(path), field)
        texts = _find_texts(path)
        contents = [(n, documents_in(p, field)) for n, p in texts]
    except OSError as error:
        raise MemspanError(
            f"cannot read {error.filename or name} ({error.strerror}): check its name and "
            "permissions"
        ) from None
    if not texts and path.is_dir():
        raise MemspanError(f"the folder {name} has no files: give one with text in it")
    if not texts:
        near = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean {near[0]}?" if near else f"named corpora are {', '.join(CORPORA)}"
        raise MemspanError(f"no corpus, file, folder or glob {name!r}: {hint}")
    skipped = []
    if not path.is_file():
        # A folder may hold other files, too; a file that is named itself is read as it is.
        reasons = [_why_not(documents) for _, documents in contents]
        skipped = [Skipped(n, why) for (n, _), why in zip(contents, reasons, strict=True) if why]
        contents = [named for named, why in zip(contents, reasons, strict=True) if not why]
    documents = [text for _, texts in contents for text in texts]
    if not any(map(len, documents)):
        what = "is empty" if path.is_file() else "holds no text"
        raise MemspanError(f"{name} {what}: give a file or folder with text in it")
    if len(contents) >= 20:
        return _by_file(contents), skipped
    if any(holds_records(p) for _, p in texts):
        return _by_document(documents), skipped
    return _by_position(documents), skipped


def has_fields(name: str) -> bool:
    """Whether a corpus's text is a field of records: JSON Lines, Parquet, a data set. True where it
    cannot be told, because the corpus is not there."""
    if name in CORPORA:
        return False
    path = Path(os.path.expanduser(name))
    if name.startswith(hugging_face.PREFIX) or hugging_face.is_saved(path):
        return True
    try:
        texts = _find_texts(path)
    except OSError:
        return True
    return not texts or any(holds_records(file) for _, file in texts)


def _of_dataset(name: str, field: str) -> tuple[Splits, list[Skipped]]:
    """A data set with its own splits; without one for validation, training text is cut for it."""
    found = hugging_face.read_dataset(name, field)
    ours = hugging_face.SPLITS
    # Of several names of one split, the first that has text.
    used: dict[str, str] = {}
    for split in ours:
        if any(found.get(split, [])):
            used.setdefault(ours[split], split)
    splits = {split: found[theirs] for split, theirs in used.items()}
    skipped = [
        Skipped(split, "a split that is not used" if any(texts) else "empty")
        for split, texts in found.items()
        if split not in used.values()
    ]
    if not splits:
        raise MemspanError(
            f"{name} has no text in splits named {', '.join(ours)}: name one of them so"
        )
    if "train" in splits and "validation" not in splits:
        cut = _by_document(splits["train"])
        if "test" in splits:
            # Its own test is kept: the last tenth of the training text is for validation.
            held_out = cut["validation"] + cut["test"]
            cut = {"train": cut["train"], "validation": held_out, "test": splits["test"]}
        splits = cut
    return splits, skipped


def _why_not(documents: list[Text]) -> str | None:
    """Why a file of a folder or glob is left out; None: it is text."""
    if documents and b"\0" in (start := _start(documents[0])):
        encoding = encoding_of(start)
        return f"{encoding}, not UTF-8" if encoding else "not text"
    filled = any(chunk.strip() for text in documents for chunk in text.chunks())
    return None if filled else "empty"


def _start(text: Text) -> bytes:
    return text.part(0, 8192).read()


def _find_texts(path: Path) -> list[tuple[str, Path]]:
    """Name and path of every file in ``path``, a file, folder or glob."""
    if path.is_dir():
        found = sorted((p.relative_to(path), p) for p in path.rglob("*") if p.is_file())
        # Nor files in hidden folders, such as those of version control.
        return [(n.as_posix(), p) for n, p in found if not any(x.startswith(".") for x in n.parts)]
    if path.is_file():
        return [(path.name, path)]
    found_by_glob = map(Path, sorted(glob.glob(str(path), recursive=True)))
    # Names are relative to the part before the pattern: a moved folder keeps its splits.
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
    root = Path(*fixed)
    return [(p.relative_to(root).as_posix(), p) for p in found_by_glob if p.is_file()]


def _by_file(files: list[tuple[str, list[Text]]]) -> Splits:
    """About 90/5/5 of the files, by a hash of their names."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    for name, documents in files:
        bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20
        splits[{0: "validation", 1: "test"}.get(bucket, "train")] += filter(len, documents)
    if all(splits.values()):
        return splits
    return _by_position([text for _, documents in files for text in documents])


def _by_document(documents: list[Text]) -> Splits:
    """About 90/5/5 of the bytes in order, whole documents; cut where a split would have none."""
    total = sum(map(len, documents))
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in filter(len, documents):
        share = 100 * start // total
        splits["train" if share < 90 else "validation" if share < 95 else "test"].append(document)
        start += len(document)
    return splits if all(splits.values()) else _by_position(documents)


def _by_position(documents: list[Text]) -> Splits:
    """90/5/5 of the concatenated bytes; a document may be cut between two splits."""
    total = sum(map(len, documents))
    edges = (0, total * 90 // 100, total * 95 // 100, total)
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in documents:
        for split, low, high in zip(splits, edges, edges[1:], strict=False):
            # No split starts inside a UTF-8 character.
            piece = document.part(
                _character_start(document, low - start), _character_start(document, high - start)
            )
            if len(piece):
                splits[split].append(piece)
        start += len(document)
    return splits


def _character_start(document: Text, position: int) -> int:
    """``position``, or up to three bytes later where a UTF-8 character begins."""
    if position <= 0:
        # The document begins here, whatever its first byte is.
        return 0
    if position >= len(document):
        return len(document)
    following = document.part(position, position + 4).read()
    for n, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return position + n
    # No character is longer, so this is not UTF-8, unless the text ends before.
    return position if len(following) == 4 else len(document)
