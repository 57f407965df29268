"""Which files make a corpus, how they are split, and how `memspan data list` shows them."""

from __future__ import annotations

import ast
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memspan.data import corpora, named
from memspan.data.corpora import load_corpus
from memspan.data.named import CORPORA, list_corpora
from memspan.data.texts import Text, by_position, encoding_of
from memspan.errors import MemspanError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def _whole(name: Path) -> bytes:
    return b"".join(t.read() for split in load_corpus(str(name)).splits.values() for t in split)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=12))
def test_position_splits_lose_no_byte_of_any_text(documents: list[bytes]) -> None:
    splits = by_position([Text.of(d) for d in documents])
    assert b"".join(t.read() for split in splits.values() for t in split) == b"".join(documents)
    # A cut moves by at most one character, so the shares hold for every encoding.
    total = sum(map(len, documents))
    train = sum(map(len, splits["train"]))
    assert 0 <= train - total * 90 // 100 <= 3


@pytest.mark.parametrize("byte", [b"\x80", b"\xbf", b"\xe9", b"a"])
def test_text_of_one_repeated_byte_is_split_like_any_other(byte: bytes) -> None:
    splits = by_position([Text.of(byte * 1000)])
    sizes = {name: sum(map(len, documents)) for name, documents in splits.items()}
    assert sizes == {"train": 900, "validation": 50, "test": 50}


def test_a_file_in_latin_1_keeps_its_first_byte(tmp_path: Path) -> None:
    text = "¿Qué? ".encode("latin-1") * 50
    (tmp_path / "t.txt").write_bytes(text)
    assert _whole(tmp_path / "t.txt") == text


def test_hidden_files_and_folders_are_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / ".git" / "objects" / "ab").write_text("an object")
    (folder / ".hidden").write_text("a setting")
    (folder / "chapters").mkdir()
    (folder / "chapters" / "1.txt").write_text("It was a dark night. " * 20)
    assert _whole(folder) == b"It was a dark night. " * 20


def test_a_folder_with_one_picture_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(MemspanError, match="holds no text"):
        load_corpus(str(tmp_path))
    with pytest.raises(MemspanError, match="holds no text"):
        load_corpus(str(tmp_path / "*.png"))
    # A file that is named is taken as it is: its bytes can be modelled.
    assert _whole(tmp_path / "a.png") == b"\x89PNG\0\0"


def test_a_folder_may_lie_inside_a_hidden_one(tmp_path: Path) -> None:
    folder = tmp_path / ".notes" / "texts"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("some text " * 10)
    assert _whole(folder) == b"some text " * 10


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
    for name, texts in by_file.items():
        assert set(texts) <= set(again[name])


def test_the_standard_library_is_whole_python_without_tests() -> None:
    corpus = load_corpus("python-stdlib")
    assert load_corpus("python-stdlib").record == corpus.record
    sizes = {name: sum(map(len, documents)) for name, documents in corpus.splits.items()}
    assert sizes["train"] > 5_000_000
    assert min(sizes["validation"], sizes["test"]) > 100_000
    assert corpus.record["python"] == ".".join(map(str, sys.version_info[:3]))
    texts = [text.read() for split in corpus.splits.values() for text in split]
    assert any(b"class JSONDecoder" in text for text in texts)
    assert not any(b"class TestJSON" in text for text in texts)
    for text in texts[:20]:
        ast.parse(text)


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


def test_downloads_stay_in_the_cache(tmp_path: Path) -> None:
    paths = [c.source.path for c in CORPORA.values() if c.source]
    assert len(set(paths)) == len(paths) == 4
    assert {p.parent for p in paths} == {tmp_path / "cache" / "downloads"}


def test_wikitext_has_the_splits_of_its_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    path = named.WIKITEXT_103.path
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", f" = {name} = \n")
    source = named.Source(
        named.WIKITEXT_103.url, hashlib.sha256(path.read_bytes()).hexdigest(), 10**6
    )
    monkeypatch.setattr(named, "WIKITEXT_103", source)
    corpus = load_corpus("wikitext-103")
    assert {name: [t.read() for t in texts] for name, texts in corpus.splits.items()} == {
        "train": [b" = train = \n"],
        "validation": [b" = valid = \n"],
        "test": [b" = test = \n"],
    }
    assert tuple(corpus.splits) == CORPORA["wikitext-103"].splits


def test_enwik8_is_cut_at_its_official_places(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bytes(90_000_000) + b"\1" * 5_000_000 + b"\2" * 5_000_000
    monkeypatch.setattr(named, "_member", lambda source, name: text)
    splits = named._hundred_million(named.ENWIK8, "enwik8")
    assert [len(t) for (t,) in splits.values()] == [90_000_000, 5_000_000, 5_000_000]
    assert [(t.read()[0], t.read()[-1]) for (t,) in splits.values()] == [(0, 0), (1, 1), (2, 2)]


def test_what_a_folder_leaves_out_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It was a dark night. " * 20)
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "c.txt").write_text(" \n" * 40_000)
    (tmp_path / "d.txt").write_text("It was a dark night. ", encoding="utf-16")
    corpus = load_corpus(str(tmp_path))
    left_out = ("b.png (not text)", "c.txt (empty)", "d.txt (UTF-16, not UTF-8)")
    assert corpus.skipped == left_out
    assert corpus.encoding is None
    assert _whole(tmp_path) == b"It was a dark night. " * 20
    assert load_corpus(str(tmp_path / "a.txt")).skipped == ()


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", None),
        ("utf-8-sig", None),
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16"),
        ("utf-16-be", "UTF-16"),
        ("latin-1", "Latin-1 or alike"),
        ("cp1252", "Latin-1 or alike"),
    ],
)
def test_encodings_are_recognised(tmp_path: Path, encoding: str, expected: str | None) -> None:
    (tmp_path / "t.txt").write_bytes(("Grüße aus Köln, naïve Leute. " * 1000).encode(encoding))
    assert load_corpus(str(tmp_path / "t.txt")).encoding == expected


@pytest.mark.parametrize(
    "start",
    [b"", b"abc", "世界".encode()[:-1], b"\x89PNG\r\n\x1a\n\0\0", b"\xff\x01", b"\0\x01\xff"],
)
def test_what_is_no_other_encoding(start: bytes) -> None:
    assert encoding_of(start) is None


def test_a_text_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc" * 100)
    text = Text.of(tmp_path / "t.txt")
    (tmp_path / "t.txt").write_text("abc")
    with pytest.raises(MemspanError, match="became shorter"):
        text.read()


@given(st.lists(st.text(max_size=40), min_size=1, max_size=30))
def test_position_splits_cut_no_character(texts: list[str]) -> None:
    documents = [t.encode() for t in texts]
    splits = by_position([Text.of(d) for d in documents])
    for split in splits.values():
        for document in split:
            document.read().decode()


def test_files_folders_and_globs(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"text number {n} " * 10)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    whole = load_corpus(str(folder))
    assert sum(map(len, whole.splits.values())) == 40
    some = load_corpus(str(folder / "1*.txt"))
    texts = [d.read() for split in some.splits.values() for d in split]
    assert b"".join(texts).count(b"number 11 ") == 10
    assert b"number 2" not in b"".join(texts)
    one = load_corpus(str(folder / "7.txt"))
    assert b"".join(d.read() for s in one.splits.values() for d in s) == b"text number 7 " * 10


def test_without_a_network_it_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9/input.txt"
    source = named.Source(url, named.SHAKESPEARE.sha256, 10**7)
    monkeypatch.setattr(named, "SHAKESPEARE", source)
    with pytest.raises(MemspanError, match="put it at") as refusal:
        load_corpus("tiny-shakespeare")
    assert str(source.path) in str(refusal.value)


def test_a_named_corpus_has_its_official_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"To be, or not to be" * 100
    source = named.Source("http://127.0.0.1:9/i.txt", hashlib.sha256(text).hexdigest(), 10**7)
    source.path.parent.mkdir(parents=True)
    source.path.write_bytes(text)
    monkeypatch.setattr(named, "SHAKESPEARE", source)
    splits = load_corpus("tiny-shakespeare").splits
    assert [t.read() for t in splits["train"]] == [text[:1710]]
    assert [t.read() for t in splits["validation"]] == [text[1710:]]


def _dataset(monkeypatch: pytest.MonkeyPatch, **parts: int) -> corpora.Corpus:
    """The corpus of a data set with splits of so many documents."""
    found = {name: [Text.of(f"{name} {n}".encode()) for n in range(k)] for name, k in parts.items()}
    monkeypatch.setattr(corpora, "read_dataset", lambda name, field: found)
    return load_corpus("hf:me/ducks")


def test_a_data_set_without_validation_gets_one_from_the_end_of_its_training_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    splits = _dataset(monkeypatch, test=3, train=100).splits
    assert {name: len(texts) for name, texts in splits.items()} == {
        "train": 91,
        "validation": 9,
        "test": 3,
    }
    kept = [text.read().decode() for text in splits["train"] + splits["validation"]]
    assert kept == [f"train {n}" for n in range(100)]
    assert splits["test"][0].read() == b"test 0"


def test_of_several_validation_splits_of_a_data_set_the_first_with_text_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = _dataset(monkeypatch, test=1, dev=1, valid=2, validation=0, train=1)
    assert list(corpus.splits) == ["train", "validation", "test"]
    assert [text.read() for text in corpus.splits["validation"]] == [b"valid 0", b"valid 1"]
    assert corpus.skipped == ("dev (a split that is not used)", "validation (empty)")
