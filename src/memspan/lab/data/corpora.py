"""Corpora by name, path or glob: found, read and split."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from memspan.calls import nearest, nearest_path
from memspan.errors import MemspanError
from memspan.files.disk import path_of
from memspan.lab.data.encodings import encoding_of
from memspan.lab.data.globs import find_matches
from memspan.lab.data.hugging_face import PREFIX, SPLITS, read_dataset
from memspan.lab.data.named import CORPORA
from memspan.lab.data.options import Texts, title
from memspan.lab.data.records import MissingFieldError
from memspan.lab.data.remarks import remarks_on_files, remarks_on_records
from memspan.lab.data.texts import Splits, Text, by_document, by_file, by_position, joined
from memspan.lab.data.unpacked import NotTextError, documents_in, holds_records

ALL = "all"
"""The split that is a whole text, in order."""


@dataclass(frozen=True)
class Corpus:
    """A text, divided into splits of documents."""

    splits: Splits
    record: dict[str, Any]
    """Its name, source and SHA-256."""
    skipped: tuple[str, ...] = ()
    """Files of a folder or glob that are left out, each with the reason."""
    remarks: tuple[str, ...] = ()
    """Lines for the user about its files: encodings, line ends, records without text."""

    @property
    def holds_ids(self) -> bool:
        """True if any part of a corpus is token ids instead of text."""
        return any(text.unit > 1 for documents in self.splits.values() for text in documents)


@dataclass(frozen=True)
class _File:
    """A file of a corpus."""

    name: str
    """Its path inside the folder or glob that was named."""
    path: Path
    documents: list[Text]


@dataclass
class _Reading:
    """Options for reading a text, and remarks collected while it is read."""

    field: str
    whole: bool
    skipped: list[str] = dataclass_field(default_factory=list)
    remarks: list[str] = dataclass_field(default_factory=list)


def load_corpus(texts: Texts, field: str = "text", whole: bool = False) -> Corpus:
    """The corpus of that name or path, or made of a text for each split.

    Args:
        texts: one of :data:`CORPORA`; a file, folder or glob; ``hf:NAME``, a data set on Hugging Face's
            hub. Or split to text: all that it names or, if that has splits, the one of the same name;
            ``NAME#SPLIT`` takes another.
        field: the field or column that holds the text, in JSON Lines, CSV, Parquet and data sets.
        whole: do not divide it: all of it, in order, is the split :data:`ALL`.

    Raises:
        MemspanError: no such name, path or split; an empty, missing or damaged file; a folder without
            text; a download that fails; records without the field; a package that is not installed; a
            text that is for training and for another split.
    """
    reading = _Reading(field, whole)
    try:
        splits = _of_whole(texts, reading) if isinstance(texts, str) else _of_parts(texts, reading)
        if whole:
            documents = [text for split in splits.values() for text in split]
            splits = {
                ALL: joined(documents) if isinstance(texts, str) and texts in CORPORA else documents
            }
        record = {"name": title(texts), "sha256": digest(splits)}
    except OSError as error:
        raise MemspanError(
            f"cannot read {error.filename or title(texts)} ({error.strerror}): check its name and "
            "permissions"
        ) from None
    if isinstance(texts, str) and texts in CORPORA:
        source = CORPORA[texts].source
        record |= {"url": source.url} if source else {"python": platform.python_version()}
    remarks = [*_shadowed(texts), *reading.remarks]
    return Corpus(splits, record, tuple(reading.skipped), tuple(remarks))


def _shadowed(texts: Texts) -> list[str]:
    """Warn of each named corpus that shares its name with a file or folder here, in a line each."""
    names = [texts] if isinstance(texts, str) else [_of_split(name)[0] for name in texts.values()]
    return [
        f"{name} is the named corpus, not the {'folder' if os.path.isdir(name) else 'file'} of that "
        f"name here: ./{name} is that one"
        for name in dict.fromkeys(names)
        if name in CORPORA and os.path.exists(name)
    ]


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
    """A file, folder or glob, perhaps with ``#SPLIT``, as an absolute path; anything else unchanged."""
    source, _ = _of_split(name)
    if source in CORPORA or source.startswith(PREFIX) or missing(source):
        return name
    return os.path.abspath(path_of(name))


def missing(texts: Texts) -> str | None:
    """The option, ``corpus`` or a split, whose text is missing, if any; the hub is not asked."""
    if isinstance(texts, str):
        return None if _is_there(texts) else "corpus"
    absent = (split for split, name in texts.items() if not _is_there(_of_split(name)[0]))
    return next(absent, None)


def is_local(texts: Texts) -> bool:
    """True if the texts can be read without a network."""
    names = [texts] if isinstance(texts, str) else [_of_split(name)[0] for name in texts.values()]
    sources = [CORPORA[name].source for name in names if name in CORPORA]
    return (
        not missing(texts)
        and not any(name.startswith(PREFIX) for name in names)
        and all(source is None or source.path.exists() for source in sources)
    )


def _is_there(name: str) -> bool:
    path = os.path.expanduser(name)
    if name in CORPORA or name.startswith(PREFIX):
        return True
    return os.path.exists(path) or any(find_matches(path))


def _of_split(name: str) -> tuple[str, str]:
    """``NAME#SPLIT`` as its two parts; a path may contain a # as well."""
    source, _, split = name.rpartition("#")
    hub = name.startswith(PREFIX)
    return (name, "") if not source or (_is_there(name) and not hub) else (source, split)


def _of_whole(name: str, reading: _Reading) -> Splits:
    """Read a text with its own splits, or cut it into splits."""
    found = _own_splits(name, reading)
    if found is None:
        files = _read_files(name, reading)
        documents = [text for file in files for text in file.documents]
        if reading.whole:
            return {ALL: documents}
        if len(files) >= 20:
            return by_file([(file.name, file.documents) for file in files])
        if any(holds_records(file.path) for file in files):
            return by_document(documents)
        return by_position(documents)
    # The first name with text, if a split has several names.
    used: dict[str, str] = {}
    for theirs, ours in SPLITS.items():
        if any(found.get(theirs, [])):
            used.setdefault(ours, theirs)
    splits = {ours: found[theirs] for ours, theirs in used.items()}
    reading.skipped += [
        f"{split} ({'a split that is not used' if any(texts) else 'empty'})"
        for split, texts in found.items()
        if split not in used.values()
    ]
    if not splits:
        raise MemspanError(
            f"{name} has no text in splits named {', '.join(SPLITS)}: rename one of its splits"
        )
    return splits if reading.whole else _with_validation(splits)


def _own_splits(name: str, reading: _Reading) -> Splits | None:
    """The documents of a named corpus or a data set by its own names of splits; None: it is neither."""
    if name in CORPORA:
        return CORPORA[name].read()
    if not _is_dataset(name):
        return None
    splits = read_dataset(name, reading.field)
    for split, documents in splits.items():
        reading.remarks += remarks_on_records(f"{name}, {split}", documents)
    return splits


def _read_files(name: str, reading: _Reading) -> list[_File]:
    """The documents of each file in a file, folder or glob."""
    if not name:
        # Path("") would be the current folder.
        raise MemspanError("no corpus is named: give a name, a file, a folder or a glob")
    path = path_of(name)
    if path.is_fifo():
        raise MemspanError(
            f"{name} is a pipe, which is read once, and a corpus again and again: give - for "
            "standard input, or write it to a file first"
        )
    texts = _find_texts(path)
    if not texts and path.is_dir():
        raise MemspanError(f"the folder {name} has no files: give one with text in it")
    if not texts:
        near = nearest(name, CORPORA) or nearest_path(path)
        hint = f"perhaps {near} is meant" if near else f"named corpora are {', '.join(CORPORA)}"
        raise MemspanError(f"no corpus, file, folder or glob {name!r}: {hint}")
    files = []
    refusals = []
    reason: str | None
    seen: dict[str, str] = {}
    for file, found in texts:
        first = seen.setdefault(os.path.realpath(found), file)
        try:
            if first != file:
                reason = f"the same file as {first}"
            else:
                documents = documents_in(found, reading.field)
                # A file that the user named is read as it is.
                reason = None if path.is_file() else _why_not(documents)
        except (MissingFieldError, NotTextError) as error:
            refusals.append(error)
            reason = getattr(error, "reason", f"no field {reading.field!r}")
        if reason:
            reading.skipped.append(f"{file} ({reason})")
        else:
            files.append(_File(file, found, documents))
    if refusals and not files:
        # Most likely all are alike: tables, and the field is wrong.
        raise refusals[0]
    if not any(len(text) for file in files for text in file.documents):
        what = "is empty" if path.is_file() else "holds no text"
        raise MemspanError(f"{name} {what}: give a file or folder with text in it")
    _remark(files, reading)
    return files


def _remark(files: list[_File], reading: _Reading) -> None:
    plain = []
    for file in files:
        if holds_records(file.path):
            reading.remarks += remarks_on_records(str(file.path), file.documents)
        else:
            plain += [text for text in file.documents if text.unit == 1]
    reading.remarks += remarks_on_files(plain)


def _of_parts(texts: Mapping[str, str], reading: _Reading) -> Splits:
    splits = {split: _part(split, name, reading) for split, name in texts.items()}
    # Such as a file of the folder to train on that is also named for another split, or a link to it.
    trained = {_place(text) for text in splits.get("train", [])}
    for split in splits.keys() - {"train"}:
        if both := next((text for text in splits[split] if _place(text) in trained), None):
            raise MemspanError(
                f"{both.name} is both in train, {texts['train']}, and in {split}, "
                f"{texts[split]}: leave it out of one of them"
            )
    return splits if reading.whole else _with_validation(splits)


def _place(text: Text) -> tuple[object, ...]:
    """The place of a text's bytes, the same under every name and link."""
    if isinstance(text.source, bytes):
        return text.source, text.start, text.stop
    file = text.source.stat()
    return file.st_dev, file.st_ino, text.start, text.stop


def _part(split: str, name: str, reading: _Reading) -> list[Text]:
    """The documents of a text that is a whole split."""
    source, wanted = _of_split(name)
    found = _own_splits(source, reading)
    if found is None:
        if wanted and _is_there(source):
            raise MemspanError(f"{source} is there, but is not divided into splits: drop #{wanted}")
        return [text for file in _read_files(name, reading) for text in file.documents]
    names = [wanted] if wanted else [n for n in found if SPLITS.get(n) == split]
    if not names and len(found) == 1:
        # Nothing to choose from.
        names = [*found]
    chosen = next((name for name in names if name in found), None)
    if chosen is None:
        raise MemspanError(
            f"{source} has no split {wanted or split}: name one that it has, such as "
            f"{source}#{next(iter(found), 'train')} ({', '.join(found)})"
        )
    if not any(found[chosen]):
        raise MemspanError(f"the split {chosen} of {source} is empty: choose another")
    return found[chosen]


def _is_dataset(name: str) -> bool:
    """True for a name on the hub, and for a folder that ``save_to_disk`` wrote."""
    folder = os.path.expanduser(name)
    # Not Path.is_file, which raises for what no path can be.
    files = ("dataset_dict.json", "dataset_info.json", "state.json")
    whole, *part = (os.path.isfile(os.path.join(folder, file)) for file in files)
    return name.startswith(PREFIX) or (name != "" and (whole or all(part)))


def has_fields(name: str) -> bool:
    """True if a corpus's text is a field of records, as in JSON Lines, CSV, Parquet and data sets, and
    if the corpus is missing, so that its records are unknown."""
    if name in CORPORA:
        return False
    if _is_dataset(name):
        return True
    try:
        texts = _find_texts(path_of(name))
    except OSError:
        return True
    return not texts or any(holds_records(file) for _, file in texts)


def _with_validation(splits: Splits) -> Splits:
    """Complete splits: without one for validation, it is cut from the training text."""
    if "train" not in splits or "validation" in splits:
        return splits
    cut = by_document(splits["train"])
    if "test" in splits:
        # Its own test is kept: the last tenth of the training text is for validation.
        held_out = cut["validation"] + cut["test"]
        cut = {"train": cut["train"], "validation": held_out, "test": splits["test"]}
    return cut


def _why_not(documents: list[Text]) -> str | None:
    """The reason to leave out a file of a folder or glob; None if it is text."""
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
        # Without hidden files and folders, such as version control's.
        return [(n.as_posix(), p) for n, p in found if not any(x.startswith(".") for x in n.parts)]
    if path.is_file():
        return [(path.name, path)]
    # Names are relative to the part before the pattern: a moved folder keeps its splits.
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
    root = Path(*fixed)
    found_by_glob = map(Path, sorted(find_matches(str(path))))
    return [(p.relative_to(root).as_posix(), p) for p in found_by_glob if p.is_file()]
