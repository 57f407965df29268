"""Compressed text and JSON Lines as corpora, and what is wrong with bad ones."""

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


def _documents(path: Path, field: str = "text") -> list[bytes]:
    splits = load_corpus(str(path), field).splits
    return [text.read() for documents in splits.values() for text in documents]


@pytest.mark.parametrize("zipped", [False, True])
def test_each_line_of_json_is_a_document(tmp_path: Path, zipped: bool) -> None:
    texts = [f'№ {n}, "quoted"\nand {"long " * (n % 7)}' for n in range(40)]
    lines = "\n\n".join(json.dumps({"id": n, "body": text}) for n, text in enumerate(texts))
    path = tmp_path / ("t.jsonl.gz" if zipped else "t.jsonl")
    path.write_bytes(gzip.compress(lines.encode()) if zipped else lines.encode())
    assert _documents(path, "body") == [f"{text}\n".encode() for text in texts]
    prepared = prepare(str(path), "bytes", field="body")
    # None is cut in two between splits.
    assert sum(len(split.document_starts) for split in prepared.splits.values()) == 40


def test_zipped_text_is_read_like_the_text_itself(tmp_path: Path) -> None:
    text = "Ein kühler Morgen. ".encode() * 9000
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    plain, zipped = (load_corpus(str(tmp_path / name)) for name in ("a.txt", "b.txt.gz"))
    assert zipped.record["sha256"] == plain.record["sha256"]


def test_a_folder_may_hold_both_and_archives_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("plain " * 20)
    (folder / "b.gz").write_bytes(gzip.compress(b"zipped " * 20))
    (folder / "c.gz").write_bytes(gzip.compress(b"\0\1\2" * 20))
    (folder / "d.tar.gz").write_bytes(gzip.compress(b"\0" * 512))
    (folder / "e.jsonl").write_text('{"text": ""}\n')
    corpus = load_corpus(str(folder))
    assert b"".join(_documents(folder)) == b"plain " * 20 + b"zipped " * 20
    assert [f.partition(" ")[0] for f in corpus.skipped] == ["c.gz", "d.tar.gz", "e.jsonl"]


def test_tables_of_something_else_in_a_folder_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.csv").write_text("text,id\nplain,1\n")
    (folder / "b.tsv").write_text("id\tlabel\n1\tx\n")
    (folder / "c.jsonl").write_text('{"id": 1}\n{"text": "late"}\n')
    corpus = load_corpus(str(folder))
    assert b"".join(_documents(folder)) == b"plain\n"
    left_out = ("b.tsv (no field 'text')", "c.jsonl (no field 'text')")
    assert corpus.skipped == left_out
    for name in ("b.tsv", "[bc].*"):
        with pytest.raises(MemspanError, match=r"b\.tsv has no 'text'; it has 'id', 'label'"):
            load_corpus(str(folder / name))
    # A mistake in texts is none of these.
    (folder / "c.jsonl").write_text('{"text": "early"}\n{"id": 1}\n')
    with pytest.raises(MemspanError, match="line 2 has no 'text'"):
        load_corpus(str(folder))


def test_a_changed_file_is_unpacked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "old", "title": "name"}')
    assert b"".join(_documents(path)) == b"old\n"
    assert b"".join(_documents(path, "title")) == b"name\n"
    path.write_text('{"text": "new"}')
    assert b"".join(_documents(path)) == b"new\n"
    # What is there is not made again.
    monkeypatch.setattr(unpacked, "_json_text", None)
    assert b"".join(_documents(path)) == b"new\n"


@pytest.mark.parametrize("name", ["t.txt.gz", "t.jsonl.gz"])
def test_zipped_files_that_are_cut_short(tmp_path: Path, name: str) -> None:
    lines = "".join(json.dumps({"text": str(n**5)}) + "\n" for n in range(3000))
    whole = gzip.compress(lines.encode())
    for content in (whole[: len(whole) // 2], whole[:5], b"no gzip at all", whole[:-8] + b"\0" * 8):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MemspanError, match="cut short or damaged"):
            load_corpus(str(tmp_path / name))


def test_a_file_unpacks_to_no_more_than_its_size_justifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"a " * 200_000))
    assert len(b"".join(_documents(path))) == 400_000
    monkeypatch.setattr(unpacked, "LEAST_LIMIT", 1000)
    path.write_bytes(gzip.compress(b"b " * 200_000))
    before = sorted((tmp_path / "cache").rglob("*"))
    with pytest.raises(MemspanError, match="holds over 200 times its own size in text"):
        load_corpus(str(path))
    assert sorted((tmp_path / "cache").rglob("*")) == before


TABLE = 'id,body\n1,"said ""no"", twice"\n\n2,"two\nlines"\n3,\n'


@pytest.mark.parametrize(
    ("name", "separator"), [("t.csv", ","), ("t.csv", ";"), ("T.CSV.gz", "\t"), ("t.tsv", "\t")]
)
def test_each_row_of_a_table_is_a_document(tmp_path: Path, name: str, separator: str) -> None:
    # With a byte order mark and line breaks as spreadsheets write them.
    content = b"\xef\xbb\xbf" + TABLE.replace(",", separator).replace("\n", "\r\n").encode()
    packed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(packed)
    said = f'said "no"{separator} twice\n'.encode()
    (split,) = load_corpus({"test": str(tmp_path / name)}, "body").splits.values()
    assert [document.read() for document in split] == [said, b"two\r\nlines\n", b""]


FINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", FINE + b'{"text": "a"', r"line 2 is not JSON \(Expecting ',' delimiter\)"),
        ("t.jsonl", FINE + b"[" * 100_000, "line 2 is not JSON"),
        (
            "t.jsonl",
            FINE + b'{"id": 1, "a": ""}',
            "line 2 has no 'text'; it has 'id', 'a': .* --field",
        ),
        ("t.jsonl", FINE + b'{"text": 5}', "line 2: text is of type int, not text"),
        ("t.jsonl", FINE + b'{"text": "\\ud800"}', "half a surrogate pair"),
        (
            "t.csv",
            b"id,body\n1,a\n",
            "t.csv has no 'text'; it has 'id', 'body': .*, or call it .txt",
        ),
        ("t.csv", b"id,text\n1,a,b\n", "line 2 has 3 columns, the first line 2: quote texts with"),
        ("t.csv", b'text\n"a"b\n', r"line 2 is not valid \(.*\): double the quotes"),
        ("t.csv", b'text\n"a\n', r"is not valid \(.unexpected end of data.\)"),
        ("t.csv", b"text\ncaf\xe9\n", "t.csv is not UTF-8"),
        ("t.csv", b"", "t.csv is empty"),
        ("t.csv", b"text,text\n1,a\n", "has several columns 'text': rename all but one"),
    ],
)
def test_bad_records_are_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MemspanError, match=says) as refusal:
        load_corpus(str(tmp_path / name))
    assert "\n" not in str(refusal.value)
