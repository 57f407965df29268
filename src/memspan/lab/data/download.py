"""Downloads: resumed where they broke off, verified, and moved into place when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from memspan.errors import MemspanError
from memspan.files.disk import cache_folder, unwritable

CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A file on the network."""

    url: str
    sha256: str
    limit: int
    """Maximum size in bytes, about; of more, no more is read."""

    @property
    def path(self) -> Path:
        """The path in the cache."""
        return cache_folder() / "downloads" / self.url.rsplit("/", 1)[1]

    def fetch(self) -> Path:
        """Download it unless it is there, from where an earlier attempt stopped; returns its path.

        Raises:
            MemspanError: no network, an error of the server, or a wrong checksum.
        """
        path = self.path
        url = self.url
        by_hand = f"download {url} elsewhere and put it at {path}"
        if path.exists():
            if _sha256(path) != self.sha256:
                raise MemspanError(
                    f"{path} has a wrong SHA-256: delete it and try again, or {by_hand}"
                )
            return path
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(0, "it is read-only")
        except OSError as error:
            raise unwritable(part, error) from None
        try:
            _download(url, part, self.limit)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise MemspanError(
                f"cannot download {url} ({reason}): try again to go on where it stopped, or {by_hand}"
            ) from None
        if _sha256(part) != self.sha256:
            part.unlink()
            raise MemspanError(
                f"the download from {url} has a wrong SHA-256: try again, or {by_hand}"
            )
        os.replace(part, path)
        return path


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
    measures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (*Progress.get_default_columns()[:2], *measures)
    with response, Progress(*columns, console=Console(stderr=True)) as progress:
        if response.status != 206:
            done = 0
        total = done + int(response.headers.get("Content-Length") or 0)
        task = progress.add_task(part.stem, total=total or None, completed=done)
        with open(part, "ab" if done else "wb") as file:
            # One that is too large has another checksum.
            while done <= limit and (chunk := response.read(CHUNK)):
                done += len(chunk)
                file.write(chunk)
                progress.update(task, completed=done)
    if done < min(total, limit):
        raise ConnectionError(f"it broke off at {done:,} of {total:,} bytes")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
