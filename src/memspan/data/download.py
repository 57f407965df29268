"""Downloads: resumed where they broke off, verified, and moved into place when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from memspan.errors import MemspanError

CHUNK = 1 << 20


def fetch(url: str, path: Path, sha256: str, limit: int) -> Path:
    """Download a file, unless it is there; either way it is verified.

    An interrupted download continues where it stopped.

    Args:
        url: its address.
        path: where it goes.
        sha256: its checksum.
        limit: maximum size in bytes.

    Raises:
        MemspanError: no network, an error of the server, a wrong checksum, a full disk.
    """
    by_hand = f"download {url} elsewhere and put it at {path}"
    if path.exists():
        if _sha256(path) != sha256:
            raise MemspanError(f"{path} has a wrong SHA-256: delete it and try again, or {by_hand}")
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(url, part, limit)
    except MemspanError:
        # Too large to be the file; left there, it would spoil every later attempt.
        part.unlink(missing_ok=True)
        raise
    except urllib.error.HTTPError as error:
        raise MemspanError(f"{url} answered {error.code}: {by_hand}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise MemspanError(
            f"cannot download {url} ({reason}): try again to go on where it stopped, or {by_hand}"
        ) from None
    if _sha256(part) != sha256:
        part.unlink()
        raise MemspanError(f"what {url} sent has a wrong SHA-256: try again, or {by_hand}")
    os.replace(part, path)
    return path


def read_member(archive: Path, member: str, limit: int) -> bytes:
    """One named member of a zip file; nothing is extracted to the disk."""
    try:
        # The declared size may lie, so no more than the limit is ever inflated.
        with zipfile.ZipFile(archive) as file:
            # Other methods let the archive say how much memory unpacking takes.
            if file.getinfo(member).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile("its compression is neither stored nor deflate")
            with file.open(member) as source:
                content = source.read(limit + 1)
    # A damaged archive may raise anything.
    except Exception as error:
        raise MemspanError(f"{archive} is damaged ({error}): delete it and try again") from None
    if len(content) > limit:
        raise MemspanError(f"{member} in {archive} is larger than {limit:,} bytes: refused")
    return content


def _download(url: str, part: Path, limit: int) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "memspan"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise
        # Nothing is left to send: the checksum tells whether the file is complete.
        return
    columns = (
        *Progress.get_default_columns()[:2],
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with response, Progress(*columns, console=Console(stderr=True)) as progress:
        if response.status != 206:
            done = 0
        expected = response.headers.get("Content-Length")
        total = done + int(expected) if expected and expected.isdigit() else None
        task = progress.add_task(part.stem, total=total, completed=done)
        with open(part, "ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                done += len(chunk)
                if done > limit:
                    raise MemspanError(f"{url} sends more than {limit:,} bytes: refused")
                file.write(chunk)
                progress.update(task, completed=done)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise ConnectionError(f"it broke off at {done:,} of {total:,} bytes")


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MemspanError(
            f"cannot read {path} ({error.strerror}): move it away and try again"
        ) from None
