"""Corpora, tokenisers, token files, streams and downloads."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memspan.data import corpora, download
from memspan.data.corpora import load_corpus
from memspan.data.prepared import prepare
from memspan.data.streams import START, Streams, evaluation_segments
from memspan.data.texts import Text
from memspan.data.token_files import read_tokens, write_tokens
from memspan.data.tokenizers import (
    ByteTokenizer,
    WordTokenizer,
    load_tokenizer,
    smallest_dtype,
    train_tokenizer,
)
from memspan.errors import MemspanError
from memspan.nn import NOT_SCORED

TEXT = "Grüße, the cat sat on the mat.\n\nThe cat, it sat!\n" * 20


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


# --- tokenisers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "characters", "subwords"])
def test_what_is_encoded_is_decoded(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(kind, [TEXT.encode()], 300)
    ids = tokenizer.encode(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT.encode()
    assert ids.dtype == smallest_dtype(tokenizer.vocab_size)
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.vocabulary_hash == tokenizer.vocabulary_hash
    assert np.array_equal(again.encode(TEXT.encode()), ids)
    decoder = tokenizer.stream_decoder()
    assert "".join(decoder.push(int(i)) for i in ids) == TEXT


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "subwords"])
@given(
    words=st.lists(st.sampled_from([*"a1! \n\t\xa0é", "don't", "　", "\r\n", "  ", "cat sat"])),
    size=st.integers(1, 9),
)
def test_a_text_in_chunks_is_encoded_as_in_one(kind: str, words: list[str], size: int) -> None:
    tokenizer = train_tokenizer(kind, [TEXT.encode()], 300)
    text = "".join(words).encode()
    pieces = tokenizer.encode_stream(text[i : i + size] for i in range(0, len(text), size))
    found = [int(i) for piece in pieces for i in piece]
    assert found == tokenizer.encode(text).tolist()


def test_chunks_that_are_no_utf8_are_refused_with_their_place() -> None:
    tokenizer = train_tokenizer("characters", [b"abc"])
    with pytest.raises(MemspanError, match=r"not UTF-8 \(byte 6\)"):
        list(tokenizer.encode_stream([b"abc\xc3", b"\xa9c\xff", b"abc"]))


@given(st.binary(max_size=200))
def test_any_bytes_survive(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_ranked_and_limited() -> None:
    tokenizer = train_tokenizer("words", [b"a b a c a b <unk>\nd"], 5)
    assert isinstance(tokenizer, WordTokenizer)
    assert tokenizer.words[:2] == ["a", "b"]
    assert {"<eos>", "<unk>"} <= set(tokenizer.words)
    assert len(tokenizer.words) == 5
    assert tokenizer.decode(tokenizer.encode(b"a b\nzebra a\n")) == b"a b\n<unk> a\n"


def test_unseen_characters_are_unknown() -> None:
    tokenizer = train_tokenizer("characters", [b"abc"])
    assert tokenizer.encode("abz€".encode()).tolist() == [1, 2, 0, 0]


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    train_tokenizer("characters", [b"abcdef"]).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("abcdef", "abcdeg"))
    with pytest.raises(MemspanError, match="checksum"):
        load_tokenizer(tmp_path)
    path.write_text('{"tokenizer": {"kind": "pickle"}}')
    with pytest.raises(MemspanError, match="damaged"):
        load_tokenizer(tmp_path)
    with pytest.raises(MemspanError, match="missing"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("size", "name"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_type_fits_the_vocabulary(size: int, name: str) -> None:
    assert smallest_dtype(size).name == name


def test_a_vocabulary_that_no_type_holds() -> None:
    with pytest.raises(MemspanError, match="too large"):
        smallest_dtype(2**32 + 1)


# --- token files --------------------------------------------------------------------------------


def test_token_files_keep_tokens_and_documents(tmp_path: Path) -> None:
    documents = [np.array([1, 2, 3], np.uint8), np.array([], np.uint8), np.array([4], np.uint8)]
    write_tokens(tmp_path / "t.bin", [[d] for d in documents], 4, ByteTokenizer())
    file = read_tokens(tmp_path / "t.bin")
    assert file.tokens.tolist() == [1, 2, 3, 4]
    assert file.document_starts.tolist() == [0, 3, 3]
    assert isinstance(file.tokens, np.memmap)


@pytest.mark.parametrize("fault", ["truncated", "flipped", "header", "offsets", "size", "missing"])
def test_damaged_token_files_are_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[np.arange(100, dtype=np.uint8)]], 100, ByteTokenizer())
    header = json.loads(path.with_suffix(".json").read_text())
    content = bytearray(path.read_bytes())
    if fault == "truncated":
        path.write_bytes(content[:-1])
    elif fault == "flipped":
        content[50] ^= 4
        path.write_bytes(content)
    elif fault == "header":
        path.with_suffix(".json").write_text("{")
    elif fault == "offsets":
        path.with_suffix(".json").write_text(json.dumps(header | {"document_starts": [5]}))
    elif fault == "size":
        path.with_suffix(".json").write_text(json.dumps(header | {"vocab_size": 300}))
    else:
        path.unlink()
    with pytest.raises(MemspanError, match="prepare the corpus again"):
        read_tokens(path)


def test_an_id_too_large_for_the_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemspanError, match="too large for uint8"):
        write_tokens(tmp_path / "t.bin", [[np.array([300])]], 1, ByteTokenizer())


# --- streams ------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 9), st.integers(30, 200))
def test_rows_continue_and_targets_follow(rows: int, length: int, n: int) -> None:
    text = np.arange(n, dtype=np.uint8)
    if (n - 1) // rows < length:
        with pytest.raises(MemspanError, match="too few"):
            Streams(text, rows, length)
        return
    streams = Streams(text, rows, length)
    first = streams.next()
    assert torch.equal(first.targets, first.inputs + 1)
    assert first.inputs[:, 0].tolist() == [b * ((n - 1) // rows) for b in range(rows)]
    assert first.starts is None
    before = first
    for _ in range(streams.n_segments - 1):
        segment = streams.next()
        assert torch.equal(segment.inputs[:, 0], before.targets[:, -1])
        before = segment
    again = streams.next()
    assert torch.equal(again.inputs, first.inputs)
    assert again.starts is not None
    assert again.starts[:, 0].all()
    assert not again.starts[:, 1:].any()


@given(st.integers(0, 30))
def test_a_position_is_all_that_resuming_needs(steps: int) -> None:
    text = np.arange(200, dtype=np.uint8)
    a, b = Streams(text, 2, 7), Streams(text, 2, 7)
    for _ in range(steps):
        a.next()
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert torch.equal(a.next().inputs, b.next().inputs)
    with pytest.raises(MemspanError, match="batch_size"):
        Streams(text, 3, 7).load_state_dict(a.state_dict())


def test_documents_begin_with_start() -> None:
    """Every token of every document is a target, the first after START."""
    text = np.arange(100, 140, dtype=np.uint8)
    # The third document is empty, and so is the last.
    streams = Streams(text, 2, 5, np.array([0, 7, 30, 30, 40]))
    found = [streams.next() for _ in range(5)]
    targets = torch.cat([segment.targets for segment in found[:4]], 1)
    assert targets.flatten().tolist() == text.tolist()
    inputs = torch.cat([segment.inputs for segment in found[:4]], 1).flatten()
    begins = torch.tensor([0, 7, 30])
    assert (inputs == START).nonzero().flatten().tolist() == begins.tolist()
    rest = torch.ones(40, dtype=torch.bool).index_fill(0, begins, False)
    assert torch.equal(inputs[rest], targets.flatten()[rest] - 1)
    marks = [None if s.starts is None else s.starts.nonzero().tolist() for s in found]
    # The text again: for every row.
    assert marks == [[[0, 0]], [[0, 2]], [[1, 0]], None, [[0, 0], [1, 0]]]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20), st.booleans())
def test_every_token_is_scored_once(n: int, rows: int, length: int, documents: bool) -> None:
    text = np.arange(100, 100 + n, dtype=np.uint16)
    if rows > n or length > n:
        with pytest.raises(MemspanError, match="lower"):
            list(evaluation_segments(text, rows, length))
        return
    scored, last = [], None
    starts = np.array([0, n // 2, n // 2, n])
    for segment in evaluation_segments(text, rows, length, starts if documents else None):
        inputs, targets = segment.inputs, segment.targets
        mask = targets != NOT_SCORED
        scored += targets[mask].tolist()
        first = (targets == 100) | (targets == 100 + n // 2) & documents
        assert torch.equal(inputs[mask], targets.sub(1).masked_fill(first, START)[mask])
        marked = torch.zeros_like(mask) if segment.starts is None else segment.starts
        assert torch.equal(marked, first & documents)
        if last is not None:
            goes_on = (mask & ~first)[:, 0]
            assert torch.equal(inputs[:, 0][goes_on], last[goes_on])
        last = targets[:, -1]
    assert sorted(scored) == text.tolist()


# --- corpora ------------------------------------------------------------------------------------


def test_the_default_corpus_is_here_and_stable() -> None:
    corpus = load_corpus("python-stdlib")
    assert set(corpus.splits) == {"train", "validation", "test"}
    sizes = {name: sum(map(len, documents)) for name, documents in corpus.splits.items()}
    assert sizes["train"] > 5_000_000
    assert min(sizes["validation"], sizes["test"]) > 100_000
    assert "python" in corpus.record
    assert load_corpus("python-stdlib").record == corpus.record


@given(st.lists(st.text(max_size=40), min_size=1, max_size=30))
def test_position_splits_lose_nothing(texts: list[str]) -> None:
    documents = [t.encode() for t in texts]
    splits = corpora._by_position([Text.of(d) for d in documents])
    assert b"".join(t.read() for split in splits.values() for t in split) == b"".join(documents)
    for split in splits.values():
        for document in split:
            document.read().decode()  # no character is cut


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


def test_a_folder_of_pictures_has_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\0\1")
    (tmp_path / "b.png").write_bytes(b"\0\1")
    with pytest.raises(MemspanError, match="holds no text"):
        load_corpus(str(tmp_path))


def test_prepare_uses_and_repairs_its_cache(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(TEXT)
    first = prepare(str(text), "characters")
    (path,) = (tmp_path / "cache/tokens").glob("*/train.bin")
    made = path.stat().st_mtime_ns
    again = prepare(str(text), "characters")
    assert path.stat().st_mtime_ns == made
    assert np.array_equal(first.splits["train"].tokens, again.splits["train"].tokens)
    tokens = first.splits["train"].tokens.copy()
    path.write_bytes(b"x")
    repaired = prepare(str(text), "characters")
    assert np.array_equal(repaired.splits["train"].tokens, tokens)
    other = prepare(str(text), "bytes", with_tokenizer=first.tokenizer)
    assert other.tokenizer is first.tokenizer


# --- downloads ----------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    content = bytes(range(256)) * 4000
    break_at: int | None = None
    ranges: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        body = self.content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.break_at] if self.break_at else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.break_at, Handler.ranges = None, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}/file.zip"
        http_server.shutdown()
        thread.join()


GOOD = hashlib.sha256(Handler.content).hexdigest()


def test_a_broken_download_goes_on(server: str, tmp_path: Path) -> None:
    path = tmp_path / "d/file.zip"
    Handler.break_at = 300_000
    with pytest.raises(MemspanError, match="try again to go on"):
        download.fetch(server, path, GOOD, 10**7)
    assert not path.exists()
    Handler.break_at = None
    assert download.fetch(server, path, GOOD, 10**7).read_bytes() == Handler.content
    assert Handler.ranges[0] is None
    assert Handler.ranges[1] is not None
    assert not path.with_name("file.zip.part").exists()
    # It is there now: no third request.
    download.fetch(server, path, GOOD, 10**7)
    assert len(Handler.ranges) == 2


def test_a_wrong_checksum_is_refused(server: str, tmp_path: Path) -> None:
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        download.fetch(server, tmp_path / "f", "0" * 64, 10**7)
    assert list(tmp_path.glob("f*")) == []
    (tmp_path / "f").write_bytes(b"put here by hand")
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        download.fetch(server, tmp_path / "f", GOOD, 10**7)


def test_more_than_the_limit_is_refused(server: str, tmp_path: Path) -> None:
    with pytest.raises(MemspanError, match="sends more than"):
        download.fetch(server, tmp_path / "f", GOOD, 1000)


def test_without_a_network_it_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9/input.txt"
    source = corpora.Source(url, corpora.SHAKESPEARE.sha256, 10**7)
    monkeypatch.setattr(corpora, "SHAKESPEARE", source)
    with pytest.raises(MemspanError, match="put it at") as refusal:
        load_corpus("tiny-shakespeare")
    assert str(source.path) in str(refusal.value)


def test_a_named_corpus_has_its_official_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"To be, or not to be" * 100
    source = corpora.Source("http://127.0.0.1:9/i.txt", hashlib.sha256(text).hexdigest(), 10**7)
    source.path.parent.mkdir(parents=True)
    source.path.write_bytes(text)
    monkeypatch.setattr(corpora, "SHAKESPEARE", source)
    splits = load_corpus("tiny-shakespeare").splits
    assert [t.read() for t in splits["train"]] == [text[:1710]]
    assert [t.read() for t in splits["validation"]] == [text[1710:]]


def test_archives_give_one_member_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("good", b"text")
        file.writestr("bomb", bytes(10**6))
        file.writestr("../evil", b"x")
    assert download.read_member(path, "good", 100) == b"text"
    with pytest.raises(MemspanError, match="larger than"):
        download.read_member(path, "bomb", 1000)
    with pytest.raises(MemspanError, match="damaged"):
        download.read_member(path, "absent", 1000)
    broken = io.BytesIO(path.read_bytes()[:50]).getvalue()
    path.write_bytes(broken)
    with pytest.raises(MemspanError, match="damaged"):
        download.read_member(path, "good", 100)
    assert not (tmp_path.parent / "evil").exists()
