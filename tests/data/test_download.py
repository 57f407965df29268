"""Downloads from servers that break off or talk nonsense, and archives that unpack to other things."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memspan.data import download
from memspan.data.download import Source
from memspan.errors import MemspanError

pytestmark = pytest.mark.hardening
CONTENT = bytes(range(256)) * 2000
GOOD = hashlib.sha256(CONTENT).hexdigest()
LIMIT = 10**6


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT; ``manner`` is what it does wrong."""

    manner = "good"
    ranges: list[str | None]

    @property
    def source(self) -> Source:
        return Source(f"http://127.0.0.1:{self.server_port}/file", GOOD, LIMIT)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        manner, wanted = self.server.manner, self.headers.get("Range")
        self.server.ranges.append(wanted)
        if manner == "nonsense":
            self.wfile.write(b"\x1b[31mNON\x07SENSE\r\n\r\n")
            return
        if manner == "absent":
            self.send_error(404)
            return
        body = CONTENT * 4 if manner == "too large" else CONTENT
        start = int(wanted[len("bytes=") : -1]) if wanted and manner != "no ranges" else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + 100_000 if manner == "breaks off" else None
        self.wfile.write(body[start:end])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path))
    (tmp_path / "downloads").mkdir()
    return tmp_path / "downloads"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "CHUNK", 1 << 14)
    with Server(("127.0.0.1", 0), Handler) as running:
        running.ranges = []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_download_that_breaks_off_often_gets_there(server: Server, folder: Path) -> None:
    path = folder / "file"
    server.manner = "breaks off"
    for attempt in range(1, 4):
        with pytest.raises(MemspanError, match="go on where it stopped"):
            server.source.fetch()
        assert (folder / "file.part").stat().st_size == attempt * 100_000
        assert not path.exists()
    server.manner = "good"
    assert server.source.fetch().read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    assert [p.name for p in folder.iterdir()] == ["file"]


def test_a_part_may_be_whole_spoilt_or_of_a_server_without_ranges(
    server: Server, folder: Path
) -> None:
    (folder / "file.part").write_bytes(CONTENT)
    server.source.fetch().unlink()
    (folder / "file.part").write_bytes(b"not the start of it")
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        server.source.fetch()
    (folder / "file.part").write_bytes(CONTENT[:1000])
    server.manner = "no ranges"
    assert server.source.fetch().read_bytes() == CONTENT


def test_what_is_too_large_is_neither_read_nor_kept(server: Server, folder: Path) -> None:
    server.manner = "too large"
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        server.source.fetch()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("manner", ["nonsense", "absent"])
def test_a_server_that_errs_gets_one_printable_line(
    server: Server, folder: Path, manner: str
) -> None:
    server.manner = manner
    path = folder / "file"
    with pytest.raises(MemspanError) as refusal:
        server.source.fetch()
    assert str(refusal.value).isprintable()
    assert f"put it at {path}" in str(refusal.value)
    assert not path.exists()


def test_a_file_put_by_hand_needs_no_network_but_must_be_the_one(folder: Path) -> None:
    nowhere = Source("http://127.0.0.1:9/file", GOOD, LIMIT)
    (folder / "file").write_bytes(CONTENT)
    assert nowhere.fetch() == folder / "file"
    (folder / "file").write_bytes(b"something else")
    with pytest.raises(MemspanError, match="wrong SHA-256: delete it"):
        nowhere.fetch()
