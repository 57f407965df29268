"""Files of text, compressed text and tables of texts as documents, and what is wrong with bad ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from memspan.data import unpacked
from memspan.data.corpora import load_corpus
from memspan.data.prepared import prepare
from memspan.errors import MemspanError

pytestmark = pytest.mark.usefixtures("own_folders")


def _write(name: str, content: bytes) -> Path:
    """Zipped if it is named so."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def _documents(name: str, field: str = "text") -> list[bytes]:
    splits = load_corpus(name, field).splits
    return [text.read() for documents in splits.values() for text in documents]


def _table(separator: str) -> tuple[bytes, list[bytes]]:
    """With a byte order mark and line breaks as spreadsheets write them; and its texts."""
    rows = 'text,id\n"said ""no"", twice",1\n\n"two\nlines",2\n,3\n'
    content = b"\xef\xbb\xbf" + rows.replace(",", separator).replace("\n", "\r\n").encode()
    return content, [f'said "no"{separator} twice\n'.encode(), b"two\r\nlines\n", b""]


TEXTS = [f'№ {n}, "quoted"\nand {"long " * (n % 7)}' for n in range(40)]
LINES = "\n\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)).encode()
RECORDS = [f"{text}\n".encode() for text in TEXTS]
NIGHT = b"It was a dark night. " * 20
FILES: dict[str, tuple[bytes, list[bytes] | str]] = {
    "a.txt": (NIGHT, [NIGHT]),
    "a.gz": (NIGHT * 400, [NIGHT * 400]),
    "a.jsonl": (LINES, RECORDS),
    "a.jsonl.gz": (LINES, RECORDS),
    "a.csv": _table(","),
    "b.csv": _table(";"),
    "A.CSV.gz": _table("\t"),
    "a.tsv": _table("\t"),
    "c.csv": (b"id,text\n1,a\n", [b"a\n"]),
    # What else a folder may hold; the hidden is not told.
    "a.png": (b"\x89PNG\0\0", "not text"),
    "b.gz": (b"\0\1\2" * 20, "not text"),
    "a.tar.gz": (NIGHT, "not text"),
    "c.txt": (b" \n" * 40_000, "empty"),
    "c.jsonl": (b'{"text": ""}\n', "empty"),
    "d.txt": (NIGHT.decode().encode("utf-16"), "UTF-16, not UTF-8"),
    "b.tsv": (b"id\tlabel\n1\tx\n", "no field 'text'"),
    "b.jsonl": (b'{"id": 1}\n{"text": "late"}\n', "no field 'text'"),
    ".hidden": (b"a setting", []),
    ".git/ab": (b"an object", []),
}


@pytest.mark.parametrize("name", FILES)
def test_the_documents_of_a_file_in_a_folder(name: str) -> None:
    """The folder itself may be in a hidden one."""
    content, holds = FILES[name]
    _write(f".mine/texts/{name}", content)
    _write(".mine/texts/z.txt", b"a text")
    corpus = load_corpus({"test": ".mine/texts"})
    found = [text.read() for text in corpus.splits["test"]]
    if isinstance(holds, str):
        assert (found, corpus.skipped) == ([b"a text"], (f"{name} ({holds})",))
    else:
        assert (found, corpus.skipped) == ([*holds, b"a text"], ())


def test_no_record_is_cut_in_two_between_splits() -> None:
    _write("t.jsonl", LINES.replace(b'"text"', b'"body"'))
    assert _documents("t.jsonl", "body") == RECORDS
    splits = prepare("t.jsonl", "bytes", field="body").splits.values()
    assert sum(len(split.document_starts) for split in splits) == len(RECORDS)
    assert len(load_corpus({"test": "t.jsonl"}, "body").splits["test"]) == len(RECORDS)


def test_a_changed_file_is_unpacked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    _write("t.jsonl", b'{"text": "old", "title": "name"}')
    assert b"".join(_documents("t.jsonl")) == b"old\n"
    assert b"".join(_documents("t.jsonl", "title")) == b"name\n"
    _write("t.jsonl", b'{"text": "new"}')
    assert b"".join(_documents("t.jsonl")) == b"new\n"
    # What is there is not made again.
    monkeypatch.setattr(unpacked, "_json_text", None)
    assert b"".join(_documents("t.jsonl")) == b"new\n"


@pytest.mark.parametrize("name", ["t.txt.gz", "t.jsonl.gz"])
def test_zipped_files_that_are_cut_short(name: str) -> None:
    lines = "".join(json.dumps({"text": str(n**5)}) + "\n" for n in range(3000))
    path = _write(name, lines.encode())
    whole = path.read_bytes()
    other = (whole[:10] + b"\xff" + whole[11:], whole[:-8] + bytes(8), b"no gzip at all")
    for content in (whole[: len(whole) // 2], whole[:5], *other):
        path.write_bytes(content)
        with pytest.raises(MemspanError, match="cut short or damaged"):
            load_corpus(name)


def test_a_file_unpacks_to_no_more_than_its_size_justifies(monkeypatch: pytest.MonkeyPatch) -> None:
    _write("t.gz", b"a " * 200_000)
    assert len(b"".join(_documents("t.gz"))) == 400_000
    monkeypatch.setattr(unpacked, "LEAST_LIMIT", 1000)
    _write("t.gz", b"b " * 200_000)
    before = sorted(Path("cache").rglob("*"))
    with pytest.raises(MemspanError, match="holds over 200 times its own size in text"):
        load_corpus("t.gz")
    assert sorted(Path("cache").rglob("*")) == before


FINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", FINE + b'{"text": "a"', r"line 2 is not JSON \(Expecting ',' delimiter\)"),
        ("t.jsonl", FINE + b"[" * 100_000, "line 2 is not JSON"),
        ("t.jsonl", FINE + b'{"id": 1, "a": ""}', "line 2 .* it has 'id', 'a': .* --field"),
        ("t.jsonl", FINE + b'{"text": 5}', "line 2: text is of type int, not text"),
        ("t.jsonl", FINE + b'{"text": "\\ud800"}', "half a surrogate pair"),
        ("t.csv", b"id,body\n1,a\n", "no 'text'; it has 'id', 'body': .*, or call it .txt"),
        ("t.csv", b"id,text\n1,a,b\n", "line 2 has 3 columns, the first line 2: quote texts with"),
        ("t.csv", b'text\n"a"b\n', r"line 2 is not valid \(.*\): double the quotes"),
        ("t.csv", b'text\n"a\n', r"is not valid \(.unexpected end of data.\)"),
        ("t.csv", b"text\ncaf\xe9\n", "t.csv is not UTF-8"),
        ("t.csv", b"", "t.csv is empty"),
        ("t.csv", b"text,text\n1,a\n", "has several columns 'text': rename all but one"),
    ],
)
def test_bad_records_are_refused(name: str, content: bytes, says: str) -> None:
    _write(name, content)
    with pytest.raises(MemspanError, match=says) as refusal:
        load_corpus(name)
    assert "\n" not in str(refusal.value)


def test_of_a_folder_only_tables_of_something_else_are_left_out() -> None:
    _write("texts/a.tsv", b"id\tlabel\n1\tx\n")
    for name in ("texts", "texts/a.tsv"):
        with pytest.raises(MemspanError, match=r"a\.tsv has no 'text'; it has 'id', 'label'"):
            load_corpus(name)
    _write("texts/b.txt", NIGHT)
    _write("texts/d.txt", b"")
    _write("t.txt", NIGHT)
    for texts in ("texts", {"train": "texts", "test": "t.txt"}):
        assert load_corpus(texts).skipped == ("a.tsv (no field 'text')", "d.txt (empty)")
    _write("texts/c.jsonl", FINE + b'{"id": 1}')
    with pytest.raises(MemspanError, match="line 2 has no 'text'"):
        load_corpus("texts")
