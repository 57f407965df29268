"""Files of text, compressed text and records as documents, and the errors for bad ones."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest

from memspan.errors import MemspanError
from memspan.lab.data import records, tables, unpacked
from memspan.lab.data.corpora import load_corpus
from memspan.lab.data.prepared import prepare

pytestmark = pytest.mark.usefixtures("own_folders")


def _write(name: str, content: bytes) -> Path:
    """Zipped if it is named so."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = next((pack for end, pack in PACKED.items() if name.endswith(end)), bytes)
    path.write_bytes(packed(content))
    return path


def _zip(content: bytes, *names: str) -> bytes:
    """A zip archive as macOS makes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names or ("folder/t.txt",):
            archive.writestr(name, content)
            archive.writestr(f"__MACOSX/{name}", b"\0\5\x16\7")
    return file.getvalue()


PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".jsonl.zip": lambda content: _zip(content, "t.jsonl"),
    ".zip": _zip,
}


def _documents(name: str, field: str = "text") -> list[bytes]:
    """All documents, in one split, which cuts none."""
    splits = load_corpus({"test": name}, field).splits
    return [text.read() for documents in splits.values() for text in documents]


TEXTS = [f'№ {n}, "quoted"\nand {"long " * (n % 7)}' for n in range(40)]
LINES = "\n\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)).encode()
RECORDS = [f"{text}\n".encode() for text in TEXTS]
NIGHT = b"It was a dark night. " * 20
ZIPPED = "a zip archive, as files of Word, Excel and EPUB are, not text"
FILES: dict[str, tuple[bytes, list[bytes] | str]] = {
    "a.txt": (NIGHT, [NIGHT]),
    "a.gz": (NIGHT * 400, [NIGHT * 400]),
    "a.jsonl": (LINES, RECORDS),
    "a.jsonl.gz": (LINES, RECORDS),
    "a.bz2": (NIGHT * 400, [NIGHT * 400]),
    "a.txt.xz": (NIGHT * 400, [NIGHT * 400]),
    "a.zip": (NIGHT * 400, [NIGHT * 400]),
    "b.jsonl.zip": (LINES, RECORDS),
    "a.ndjson": (LINES, RECORDS),
    "a.json": (
        json.dumps([json.loads(line) for line in LINES.splitlines() if line], indent=1).encode(),
        RECORDS,
    ),
    "b.json": (b"\xef\xbb\xbf" + LINES, RECORDS),
    "c.json.gz": (b' [{"text": "a"} , {"text": null},{"text":"b\\n"}] ', [b"a\n", b"", b"b\n"]),
    "null.jsonl": (b'{"text": null}\n{"text": "a"}\n', [b"", b"a\n"]),
    # What else a folder may hold; the hidden is not told.
    "a.png": (b"\x89PNG\0\0", "not text"),
    "b.gz": (b"\0\1\2" * 20, "not text"),
    "a.tar.gz": (NIGHT, "an archive, not text"),
    "a.pdf": (b"%PDF-1.7\n\xe2\xe3", "a PDF, not text"),
    "a.docx": (_zip(b"", "word/document.xml"), ZIPPED),
    "a.7z": (NIGHT, "an archive, not text"),
    "d.gz": (_zip(b""), ZIPPED),
    "package.json": (b'{"name": "a package"}', "no field 'text'"),
    "c.txt": (b" \n" * 40_000, "empty"),
    "c.jsonl": (b'{"text": ""}\n', "empty"),
    "d.txt": (NIGHT.decode().encode("utf-16"), "UTF-16, not UTF-8"),
    "b.jsonl": (b'{"id": 1}\n{"text": "late"}\n', "no field 'text'"),
    ".hidden": (b"a setting", []),
    ".git/ab": (b"an object", []),
}


@pytest.mark.parametrize("name", FILES)
def test_reads_each_kind_of_file_in_a_folder(name: str) -> None:
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
    monkeypatch.setattr(records, "_json_text", None)
    assert b"".join(_documents("t.jsonl")) == b"new\n"


@pytest.mark.parametrize("name", ["t.txt.gz", "t.jsonl.gz", "t.bz2", "t.xz", "t.zip"])
def test_refuses_compressed_files_cut_short(name: str) -> None:
    lines = "".join(json.dumps({"text": str(n**5)}) + "\n" for n in range(3000))
    path = _write(name, lines.encode())
    whole = path.read_bytes()
    end = b"" if name == "t.zip" else whole[:-8] + bytes(8)
    other = (b"\xff" + whole[1:], end, b"not packed at all")
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


def test_packed_table_is_measured_before_its_library_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single value of 1 GB in 1 MB of gzip took 4.4 GB of memory before it was refused."""
    monkeypatch.setattr(unpacked, "LEAST_LIMIT", 1000)
    monkeypatch.setattr(tables, "_csv", lambda *_: pytest.fail("read"))
    _write("t.csv.gz", b"text\n" + b"b" * 400_000)
    with pytest.raises(MemspanError, match="holds over 200 times its own size in text"):
        load_corpus("t.csv.gz")


FINE = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", FINE + b'{"text": "a"', r"line 2 is not JSON \(Expecting ',' delimiter\)"),
        ("t.jsonl", FINE + b"[" * 100_000, "line 2 is not JSON"),
        ("t.jsonl", FINE + b'{"id": 1, "a": ""}', "line 2 .* it has 'id', 'a': .* --field"),
        ("t.jsonl", FINE + b'{"text": 5}', "line 2: text is of type int, not text"),
        ("t.jsonl", FINE + b'{"text": "\\ud800"}', "half a surrogate pair"),
        ("t.json", b'{"a": [{"text": "b"}]}', "has no 'text'; it has 'a': .*, or call it .txt"),
        ("t.json", b'[{"text": "a"}, 5]', r"record 2 is not a JSON object: give a list .*\.txt"),
        ("t.json", b'[{"text": "a"}, {"text"', "record 2 is not JSON"),
        ("t.json", b'[{"text": "a"}', "record 2 is not JSON"),
        ("t.json", b"[" * 100_000, "record 1 is nested too deep"),
        ("t.json", b'[{"text": "\xff"}]', "t.json is not UTF-8"),
        (
            "t.jsonl",
            b'{"text": [{"a": {"b": "c"}}]}',
            r"whose texts may be text\[\]\.a\.b: name",
        ),
        ("t.pdf", b"%PDF-1.7\n\xe2\xe3", r"t.pdf is a PDF, not text: convert it first \(pdftotext"),
        (
            "t.txt",
            gzip.compress(b"a", mtime=0),
            r"t.txt is compressed by gzip, not text: add .gz to its name",
        ),
        ("t.txt", bz2.compress(b"a"), "t.txt is compressed by bzip2, .*: add .bz2 to its name"),
        ("t.tar", b"", "t.tar is an archive, not text: unpack it, and give the folder"),
        (
            "t.zst",
            b"\x28\xb5\x2f\xfd",
            "which needs Python 3.14 or zstandard: pip install zstandard",
        ),
        ("t.rar", b"Rar!", "unpack it, and give the folder"),
    ],
)
def test_bad_records_are_refused(name: str, content: bytes, says: str) -> None:
    _write(name, content)
    with pytest.raises(MemspanError, match=says) as refusal:
        load_corpus(name)
    assert "\n" not in str(refusal.value)


def test_skips_records_of_something_else_in_a_folder() -> None:
    _write("texts/a.jsonl", b'{"id": 1, "label": "x"}\n')
    for name in ("texts", "texts/a.jsonl"):
        with pytest.raises(MemspanError, match=r"line 1 has no 'text'; it has 'id', 'label'"):
            load_corpus(name)
    _write("texts/b.txt", NIGHT)
    _write("texts/d.txt", b"")
    _write("t.txt", NIGHT)
    for texts in ("texts", {"train": "texts", "test": "t.txt"}):
        assert load_corpus(texts).skipped == ("a.jsonl (no field 'text')", "d.txt (empty)")
    _write("texts/c.jsonl", FINE + b'{"id": 1}')
    with pytest.raises(MemspanError, match="line 2 has no 'text'"):
        load_corpus("texts")


CHAT = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello\n"}]},
    {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "Bye"}]},
]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_a_path_leads_to_texts_inside_a_record(name: str) -> None:
    lines = "\n".join(map(json.dumps, CHAT)).encode()
    _write(name, lines if name == "t.jsonl" else json.dumps(CHAT).encode())
    assert _documents(name, "messages[].content") == [b"Hi\nHello\n", b"Bye\n"]
    with pytest.raises(
        MemspanError,
        match=r"messages is of type list, not text, whose texts may be "
        r"messages\[\]\.content: name the field",
    ):
        load_corpus(name, "messages")
    for wrong in (
        "messages[].text",
        "messages[].content.x",
        "messages.content",
        "messages[]",
        "text",
    ):
        with pytest.raises(MemspanError, match=r"has no '(messages\[\]\.)?text'; it has|not text"):
            load_corpus(name, wrong)
    with pytest.raises(MemspanError, match=r"has no 'text'; .*, such as messages\[\]\.content, or"):
        load_corpus(name)
    # A name may look like a path.
    _write("u.jsonl", b'{"a.b": "one"}\n{"a": {"b": "two"}}\n')
    assert _documents("u.jsonl", "a.b") == [b"one\n", b"two\n"]


def test_records_without_text_are_counted() -> None:
    _write("t.jsonl", b'{"text": "a"}\n{"text": null}\n{"text": ""}\n')
    assert load_corpus("t.jsonl").remarks == ("2 of 3 records of t.jsonl have no text",)


def test_a_zip_of_several_files_is_refused() -> None:
    _write("t.raw", _zip(b"a", "a.txt", "b.txt")).rename("t.zip")
    with pytest.raises(MemspanError, match=r"t\.zip holds 2 files: unpack it, and give the folder"):
        load_corpus("t.zip")


@pytest.mark.parametrize("name", ["t.jsonl", "t.gz"])
@pytest.mark.parametrize("suffix", [".txt", ".ends"])
@pytest.mark.parametrize("damage", ["a byte", "cut", "empty", "longer", "another's"])
def test_a_damaged_cache_is_made_anew(name: str, suffix: str, damage: str) -> None:
    """A damaged cache was trained on in silence."""
    _write(name, {"t.jsonl": LINES, "t.gz": NIGHT}[name])
    before = _documents(name)
    (path,) = Path("cache/texts").glob(f"*{suffix}")
    whole = path.read_bytes()
    damaged = {
        "a byte": bytes([whole[0] ^ 1]) + whole[1:],
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "longer": whole + bytes(8),
        "another's": bytes(len(whole)),
    }
    path.write_bytes(damaged[damage])
    assert _documents(name) == before
    assert path.read_bytes() == whole
