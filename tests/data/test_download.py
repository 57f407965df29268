"""Downloads from servers that break off or talk nonsense, and archives that unpack to other things."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memspan.data import download
from memspan.data.download import fetch
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
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


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
        if manner == "broken chunk":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"64\r\nshort")
            return
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + 100_000 if manner == "breaks off" else None
        self.wfile.write(body[start:end])

    def log_message(self, *args: object) -> None:
        pass


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


def test_a_download_that_breaks_off_often_gets_there(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file"
    server.manner = "breaks off"
    for attempt in range(1, 4):
        with pytest.raises(MemspanError, match="go on where it stopped"):
            fetch(server.url, path, GOOD, LIMIT)
        assert (tmp_path / "file.part").stat().st_size == attempt * 100_000
        assert not path.exists()
    server.manner = "good"
    assert fetch(server.url, path, GOOD, LIMIT).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_server_without_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.manner = "no ranges"
    assert fetch(server.url, tmp_path / "file", GOOD, LIMIT).read_bytes() == CONTENT


def test_a_part_that_is_whole_needs_no_more(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    assert fetch(server.url, tmp_path / "file", GOOD, LIMIT).read_bytes() == CONTENT


def test_a_spoilt_part_is_dropped_and_the_next_attempt_succeeds(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file.part").write_bytes(b"not the start of it")
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        fetch(server.url, tmp_path / "file", GOOD, LIMIT)
    assert fetch(server.url, tmp_path / "file", GOOD, LIMIT).read_bytes() == CONTENT


def test_what_is_too_large_is_neither_read_nor_kept(server: Server, tmp_path: Path) -> None:
    server.manner = "too large"
    with pytest.raises(MemspanError, match="wrong SHA-256"):
        fetch(server.url, tmp_path / "file", GOOD, LIMIT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("manner", ["nonsense", "broken chunk", "absent"])
def test_a_server_that_errs_gets_one_printable_line(
    server: Server, tmp_path: Path, manner: str
) -> None:
    server.manner = manner
    path = tmp_path / "file"
    with pytest.raises(MemspanError) as refusal:
        fetch(server.url, path, GOOD, LIMIT)
    assert str(refusal.value).isprintable()
    assert f"put it at {path}" in str(refusal.value)
    assert not path.exists()


def test_a_file_put_by_hand_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert fetch("http://127.0.0.1:9/file", tmp_path / "file", GOOD, LIMIT) == tmp_path / "file"


def test_another_file_put_by_hand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(MemspanError, match="wrong SHA-256: delete it"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", GOOD, LIMIT)
