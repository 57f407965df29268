"""Downloads from servers that break off or talk nonsense, and archives that unpack to other things."""

from __future__ import annotations

import errno
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from memspan.errors import MemspanError
from memspan.files.disk import unwritable, write_atomically
from memspan.lab.data import download
from memspan.lab.data.download import Source
from memspan.lab.data.named import ENWIK8
from memspan.lab.data.prepared import prepare

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
        manner = self.server.manner
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        if manner == "nonsense":
            self.wfile.write(b"\x1b[31mNON\x07SENSE\r\n\r\n")
            return
        body = CONTENT * 4 if manner == "too large" else CONTENT
        start = int(wanted[len("bytes=") : -1]) if wanted and manner != "no ranges" else 0
        if manner == "absent" or start >= len(body):
            self.send_error(404 if manner == "absent" else 416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: 100_000 if manner == "breaks off" else None])

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
    server.manner = "breaks off"
    for attempt in range(1, 4):
        with pytest.raises(MemspanError, match="go on where it stopped"):
            server.source.fetch()
        found = [(path.name, path.stat().st_size) for path in folder.iterdir()]
        assert found == [("file.part", attempt * 100_000)]
    server.manner = "good"
    assert server.source.fetch().read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    assert [p.name for p in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("manner", "part", "says"),
    [
        ("good", CONTENT, ""),
        ("no ranges", CONTENT[:1000], ""),
        ("good", b"not the start of it", "wrong SHA-256"),
        # Neither read nor kept.
        ("too large", None, "wrong SHA-256"),
        ("nonsense", None, "cannot download"),
        ("absent", None, "cannot download"),
    ],
    ids=["whole", "no ranges", "spoilt", "too large", "nonsense", "absent"],
)
def test_a_download_succeeds_or_says_why_not(
    manner: str, part: bytes | None, says: str, server: Server, folder: Path
) -> None:
    server.manner = manner
    if part is not None:
        (folder / "file.part").write_bytes(part)
    if not says:
        assert server.source.fetch().read_bytes() == CONTENT
        return
    with pytest.raises(MemspanError, match=says) as refusal:
        server.source.fetch()
    assert str(refusal.value).isprintable()
    assert f"put it at {folder / 'file'}" in str(refusal.value)
    assert list(folder.iterdir()) == []


def test_a_file_put_by_hand_needs_no_network_but_must_be_the_one(folder: Path) -> None:
    nowhere = Source("http://127.0.0.1:9/file", GOOD, LIMIT)
    (folder / "file").write_bytes(CONTENT)
    assert nowhere.fetch() == folder / "file"
    (folder / "file").write_bytes(b"something else")
    with pytest.raises(MemspanError, match="wrong SHA-256: delete it"):
        nowhere.fetch()


def test_a_user_without_a_home_is_told_where_to_put_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may run under any number."""
    monkeypatch.delenv("MEMSPAN_CACHE", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", _no_home)
    text = tmp_path / "t.txt"
    text.write_text("text " * 100)
    with pytest.raises(MemspanError, match="this user has no home: set MEMSPAN_CACHE to a folder"):
        prepare(str(text), "bytes")


def _no_home(name: str) -> str:
    raise RuntimeError("could not determine the home directory")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("text " * 100)
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "file/cache"))
    for read in (lambda: prepare(str(tmp_path / "file"), "bytes"), ENWIK8.fetch):
        with pytest.raises(
            MemspanError,
            match=r"^cannot write in the cache, .*file/cache \(Not a directory\): "
            "set MEMSPAN_CACHE to a folder of your own$",
        ):
            read()
    with pytest.raises(
        MemspanError, match="check the path and its permissions or choose another folder; what was"
    ):
        write_atomically(tmp_path / "file/other", b"")


def test_a_full_disk_asks_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSPAN_CACHE", str(tmp_path / "cache"))
    full = OSError(errno.ENOSPC, "No space left on device")
    for path, says in {
        "cache/a": "free some space, or set MEMSPAN_CACHE to a folder of your own$",
        "a": "free some space or choose another folder$",
    }.items():
        assert re.search(says, str(unwritable(tmp_path / path, full)))
