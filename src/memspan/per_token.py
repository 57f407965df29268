"""Every token's loss, in JSON Lines: its position, its id and nats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from memspan.data.streams import Segment
from memspan.errors import MemspanError
from memspan.nn import NOT_SCORED

Losses = Callable[[Segment, Tensor], None]
"""Takes a segment and its losses ``[B, T]``."""


@contextmanager
def losses_to(path: str | Path | None, rows: np.ndarray) -> Iterator[Losses | None]:
    """Yields a function that writes each token's loss to a new file; streams begin at ``rows [B]``.

    Raises:
        MemspanError: the file exists, or cannot be written.
    """
    if path is None:
        yield None
        return
    with _created(Path(path)) as file:
        first = torch.from_numpy(rows)[:, None]

        def each(segment: Segment, losses: Tensor) -> None:
            nonlocal first
            positions = first + torch.arange(losses.shape[1])
            first = positions[:, -1:] + 1
            scored = (segment.targets != NOT_SCORED).cpu()
            columns = [t.cpu()[scored].tolist() for t in (positions, segment.targets, losses)]
            for position, token, nats in zip(*columns, strict=True):
                print(
                    f'{{"position": {position}, "token": {token}, "nats": {nats:.6g}}}', file=file
                )

        try:
            yield each
        finally:
            if not file.tell():
                # Failed before the first token: the same command may be given again.
                Path(path).unlink()


def _created(path: Path) -> TextIO:
    try:
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        raise MemspanError(f"{path} exists: give --per-token another path") from None
    except OSError as error:
        raise MemspanError(f"cannot write {path} ({error.strerror}): check --per-token") from None
