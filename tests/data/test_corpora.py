"""Files of a corpus, their splits, and the list that `memspan data list` prints."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memspan.errors import MemspanError
from memspan.lab.data import corpora, named
from memspan.lab.data.corpora import load_corpus
from memspan.lab.data.globs import find_matches
from memspan.lab.data.named import CORPORA, list_corpora
from memspan.lab.data.texts import Text, by_position

pytestmark = pytest.mark.usefixtures("own_folders")


@given(
    st.lists(st.binary(max_size=60), min_size=1, max_size=12)
    | st.lists(st.text(max_size=40).map(str.encode), min_size=1, max_size=30)
)
@example(["é世🎉".encode() * 9])
@example([b"ab", "🎉".encode() * 5])
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


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/text", "a\0b", "", "enwik", "../no"])
def test_unknown_names_get_one_line(name: str) -> None:
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


def test_standard_library_corpus_is_python_without_tests() -> None:
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
    path = tmp_path / "cache/downloads/enwik8.zip"
    url = named.ENWIK8.url
    assert rows["enwik8"]["state"] == f"downloaded on first use, or put {url} at {path}"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert {row["name"]: row["state"] for row in list_corpora()}["enwik8"] == f"downloaded: {path}"


@pytest.mark.parametrize("name", ["tiny-shakespeare", "wikitext-103"])
def test_a_named_corpus_has_its_official_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files stand in for downloads."""
    parts = (b"ab" * 90, b"cd" * 10, b"e")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for part, content in zip(("train", "valid", "test"), parts, strict=True):
            archive.writestr(f"wikitext-103/wiki.{part}.tokens", content)
    files = {"WIKITEXT_103": zipped.getvalue(), "SHAKESPEARE": parts[0] + parts[1]}
    for constant, content in files.items():
        source = replace(getattr(named, constant), sha256=hashlib.sha256(content).hexdigest())
        source.path.parent.mkdir(parents=True, exist_ok=True)
        source.path.write_bytes(content)
        monkeypatch.setattr(named, constant, source)
    splits = load_corpus(name).splits
    assert tuple(splits) == CORPORA[name].splits
    assert [text.read() for texts in splits.values() for text in texts] == [*parts][: len(splits)]


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_large_corpora_are_cut_as_is_customary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_member", lambda source, file: {name: bytes(100_000_000)}[file])
    edges = [(text.start, text.stop) for (text,) in CORPORA[name].read().values()]
    assert edges == [(0, 90_000_000), (90_000_000, 95_000_000), (95_000_000, 100_000_000)]


def test_keeps_a_named_file_as_it_is(tmp_path: Path) -> None:
    """Its bytes can be modelled; of a folder or glob it is left out."""
    picture = b"\x89PNG\0\0"
    (tmp_path / "a.png").write_bytes(picture)
    for name in (tmp_path, tmp_path / "*.png"):
        with pytest.raises(MemspanError, match="holds no text"):
            load_corpus(str(name))
    corpus = load_corpus(str(tmp_path / "a.png"))
    assert b"".join(t.read() for split in corpus.splits.values() for t in split) == picture
    assert corpus.skipped == ()


def test_a_pattern_enters_each_folder_once(tmp_path: Path) -> None:
    """Links may lead back to a folder; a file is read once, whatever links lead to it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.txt").write_text("one. " * 40)
    (tmp_path / "a/.hidden.txt").write_text("two. " * 40)
    for name in ("up", "again"):
        (tmp_path / "a" / name).symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "y.txt").symlink_to("a/x.txt")
    corpus = load_corpus({"test": str(tmp_path / "**/*.txt")})
    assert [text.read() for text in corpus.splits["test"]] == [b"one. " * 40]
    assert corpus.skipped == ("y.txt (the same file as a/x.txt)",)


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "**",
        "**/*",
        "*/*.txt",
        "a/**/c*",
        "[ab]/?.txt",
        "a/*/../*.txt",
        ".*",
        "a/.*",
        "no/*",
        "**/a",
    ],
)
def test_patterns_match_as_python_s_own(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b/c.txt", "a/b/.d.txt", "a/e.txt", "b/f.txt", ".g/h.txt", "i.txt", "a/.j/k"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    for each in (pattern, str(tmp_path / pattern)):
        monkeypatch.chdir(tmp_path)
        wanted = glob.glob(each, recursive=True)
        files = sorted(filter(os.path.isfile, find_matches(each)))
        assert files == sorted(filter(os.path.isfile, wanted))


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode there")
def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    for n in range(20):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 %d.txt" % n)).write_text(f"{n} " * 50)
    found = load_corpus(str(tmp_path)).splits
    assert sum(len(text) for split in found.values() for text in split) == 50 * (20 * 2 + 10)


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_link_between_splits_is_noticed(link: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/x.txt").write_text("text " * 40)
    getattr(tmp_path / "b/y.txt", link)(tmp_path / "a/x.txt")
    with pytest.raises(
        MemspanError, match=r"y\.txt is both in train, .*a, and in test, .*b: leave"
    ):
        load_corpus({"train": str(tmp_path / "a"), "test": str(tmp_path / "b")})


def test_a_data_set_has_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the training text stands in for a missing validation split; of several, the first with
    text."""
    names = ("train", "test", "valid")
    train, test, valid = ([Text.of(f"{x} {n}".encode()) for n in range(100)] for x in names)
    parts = {"test": test, "train": train}
    monkeypatch.setattr(corpora, "read_dataset", lambda name, field: parts)
    cut = {"train": train[:91], "validation": train[91:], "test": test}
    assert [*load_corpus("hf:me/ducks").splits.items()] == [*cut.items()]
    parts |= {"dev": train, "valid": valid, "validation": []}
    corpus = load_corpus("hf:me/ducks")
    own = {"train": train, "validation": valid, "test": test}
    assert [*corpus.splits.items()] == [*own.items()]
    assert corpus.skipped == ("dev (a split that is not used)", "validation (empty)")
    # As a part of a corpus: by its own name, or the first that means this split.
    found = load_corpus({"train": "hf:me/ducks#valid", "validation": "hf:me/ducks"}).splits
    assert found == {"train": valid, "validation": train}
    parts.pop("test")
    with pytest.raises(MemspanError, match=r"no split test: .*hf:me/ducks#train \(train, dev, val"):
        load_corpus({"train": "hf:me/ducks", "test": "hf:me/ducks"})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_pipe_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """As the shell's <(...) gives it."""
    os.mkfifo(tmp_path / "text")
    with pytest.raises(MemspanError, match=r"is a pipe, .*: give - for standard input"):
        load_corpus(str(tmp_path / "text"))
