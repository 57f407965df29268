"""Which files make a corpus, how they are split, and how `memspan data list` shows them."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspan.data import corpora, named
from memspan.data.corpora import load_corpus
from memspan.data.named import CORPORA, list_corpora
from memspan.data.texts import Text, by_position
from memspan.errors import MemspanError

pytestmark = pytest.mark.usefixtures("own_folders")


def _whole(name: Path) -> bytes:
    return b"".join(t.read() for split in load_corpus(str(name)).splits.values() for t in split)


@given(
    st.lists(st.binary(max_size=60), min_size=1, max_size=12)
    | st.lists(st.text(max_size=40).map(str.encode), min_size=1, max_size=30)
)
def test_position_splits_lose_no_byte_and_cut_no_character(documents: list[bytes]) -> None:
    splits = by_position([Text.of(d) for d in documents])
    pieces = [text.read() for split in splits.values() for text in split]
    assert b"".join(pieces) == b"".join(documents)
    # A cut moves by at most one character, so the shares hold for every encoding.
    total = sum(map(len, documents))
    train = sum(map(len, splits["train"]))
    assert 0 <= train - total * 90 // 100 <= 3
    if all(document.decode(errors="replace").encode() == document for document in documents):
        for piece in pieces:
            piece.decode()


def test_a_folder_with_one_picture_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    for name in (tmp_path, tmp_path / "*.png"):
        with pytest.raises(MemspanError, match="holds no text"):
            load_corpus(str(name))
    # A file that is named is taken as it is: its bytes can be modelled.
    assert _whole(tmp_path / "a.png") == b"\x89PNG\0\0"


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/text", "a\0b", "", "enwik", "../no"])
def test_names_that_are_nothing_get_one_line(name: str) -> None:
    with pytest.raises(MemspanError) as refusal:
        load_corpus(name)
    assert "\n" not in str(refusal.value)


def test_few_files_are_cut_by_position_and_many_by_file(tmp_path: Path) -> None:
    for n in range(19):
        (tmp_path / f"{n:02}.txt").write_text(f"{n:02}" * 50)
    cut = load_corpus(str(tmp_path)).splits
    # 19 files of 100 bytes: 90% ends inside the eighteenth.
    assert [len(t) for t in cut["train"]] == [100] * 17 + [10]
    for n in range(19, 60):
        (tmp_path / f"{n:02}.txt").write_text(f"{n:02}" * 50)
    by_file = load_corpus(str(tmp_path)).splits
    assert all(len(text) == 100 for split in by_file.values() for text in split)
    # A new file moves no other one.
    (tmp_path / "new.txt").write_text("n" * 100)
    again = load_corpus(str(tmp_path)).splits
    assert all(set(texts) <= set(again[name]) for name, texts in by_file.items())


def test_the_standard_library_is_whole_python_without_tests() -> None:
    corpus = load_corpus("python-stdlib")
    sizes = {name: sum(map(len, documents)) for name, documents in corpus.splits.items()}
    assert sizes["train"] > 5_000_000
    assert min(sizes["validation"], sizes["test"]) > 100_000
    assert corpus.record["python"] == ".".join(map(str, sys.version_info[:3]))
    texts = [text.read() for split in corpus.splits.values() for text in split]
    assert any(b"class JSONDecoder" in text for text in texts)
    assert not any(b"class TestJSON" in text for text in texts)


def test_every_named_corpus_has_a_row(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in list_corpora()}
    assert list(rows) == list(CORPORA)
    assert rows["python-stdlib"]["state"] == "no download needed"
    assert rows["tiny-shakespeare"]["splits"] == ("train", "validation")
    assert str(tmp_path / "cache") in rows["enwik8"]["state"]
    assert f"downloaded on first use, or put {named.ENWIK8.url}" in rows["enwik8"]["state"]
    named.ENWIK8.path.parent.mkdir(parents=True)
    named.ENWIK8.path.write_bytes(b"")
    (row,) = (row for row in list_corpora() if row["name"] == "enwik8")
    assert row["state"].startswith("downloaded: ")


def _downloaded(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    """As if the file of a named corpus were there, and this one."""
    source = replace(getattr(named, name), sha256=hashlib.sha256(content).hexdigest())
    source.path.parent.mkdir(parents=True, exist_ok=True)
    source.path.write_bytes(content)
    monkeypatch.setattr(named, name, source)


@pytest.mark.parametrize("name", ["tiny-shakespeare", "wikitext-103"])
def test_a_named_corpus_has_its_official_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, zipped = (b"ab" * 90, b"cd" * 10, b"e"), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for part, content in zip(("train", "valid", "test"), parts, strict=True):
            archive.writestr(f"wikitext-103/wiki.{part}.tokens", content)
    _downloaded(monkeypatch, "WIKITEXT_103", zipped.getvalue())
    _downloaded(monkeypatch, "SHAKESPEARE", parts[0] + parts[1])
    splits = load_corpus(name).splits
    assert tuple(splits) == CORPORA[name].splits
    assert [text.read() for texts in splits.values() for text in texts] == [*parts][: len(splits)]


def test_enwik8_is_cut_at_its_official_places(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bytes(90_000_000) + b"\1" * 5_000_000 + b"\2" * 5_000_000
    monkeypatch.setattr(named, "_member", lambda source, name: text)
    splits = named._hundred_million(named.ENWIK8)
    assert [len(t) for (t,) in splits.values()] == [90_000_000, 5_000_000, 5_000_000]
    assert [(t.read()[0], t.read()[-1]) for (t,) in splits.values()] == [(0, 0), (1, 1), (2, 2)]


def test_what_a_folder_leaves_out_is_told(tmp_path: Path) -> None:
    """Hidden files are not its text, but it may be in a hidden folder."""
    folder = tmp_path / ".mine"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "ab").write_text("an object")
    (folder / ".hidden").write_text("a setting")
    (folder / "chapters").mkdir()
    (folder / "chapters" / "a.txt").write_text("It was a dark night. " * 20)
    (folder / "b.png").write_bytes(b"\x89PNG\0\0")
    (folder / "c.txt").write_text(" \n" * 40_000)
    (folder / "d.txt").write_text("It was a dark night. ", encoding="utf-16")
    corpus = load_corpus(str(folder))
    left_out = ("b.png (not text)", "c.txt (empty)", "d.txt (UTF-16, not UTF-8)")
    assert corpus.skipped == left_out
    assert corpus.encoding is None
    assert _whole(folder) == b"It was a dark night. " * 20
    assert load_corpus(str(folder / "chapters" / "a.txt")).skipped == ()


TEXT = "Grüße aus Köln, naïve Leute. " * 1000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (TEXT.encode("utf-16"), "UTF-16"),
        (TEXT.encode("utf-16-le"), "UTF-16"),
        (TEXT.encode("latin-1"), "Latin-1 or alike"),
        (TEXT.encode(), None),
        ("世界".encode()[:-1], None),
        (b"\x89PNG\r\n\x1a\n\0\0", None),
        (b"\xff\x01" * 9, None),
    ],
)
def test_encodings_are_recognised(tmp_path: Path, content: bytes, expected: str | None) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    assert load_corpus(str(tmp_path / "t.txt")).encoding == expected


def _dataset(monkeypatch: pytest.MonkeyPatch, **parts: int) -> corpora.Corpus:
    """The corpus of a data set with splits of so many documents."""
    found = {name: [Text.of(f"{name} {n}".encode()) for n in range(k)] for name, k in parts.items()}
    monkeypatch.setattr(corpora, "read_dataset", lambda name, field: found)
    return load_corpus("hf:me/ducks")


def test_a_data_set_has_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one for validation, the end of its training text is that; of several, the first with
    text."""
    splits = _dataset(monkeypatch, test=3, train=100).splits
    assert list(map(len, splits.values())) == [91, 9, 3]
    kept = [text.read().decode() for text in splits["train"] + splits["validation"]]
    assert kept == [f"train {n}" for n in range(100)]
    assert splits["test"][0].read() == b"test 0"
    corpus = _dataset(monkeypatch, test=1, dev=1, valid=2, validation=0, train=1)
    assert list(corpus.splits) == ["train", "validation", "test"]
    assert [text.read() for text in corpus.splits["validation"]] == [b"valid 0", b"valid 1"]
    assert corpus.skipped == ("dev (a split that is not used)", "validation (empty)")
