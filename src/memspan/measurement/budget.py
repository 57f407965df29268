"""CPU seconds to spend, and who is told how many are spent."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """So many CPU seconds of this process, all threads together, from now on."""

    def __init__(self, seconds: float, tell: Callable[[], None] = lambda: None) -> None:
        self._start, self._seconds, self._tell = time.process_time(), seconds, tell

    def spent(self) -> float:
        """Seconds since the start."""
        return time.process_time() - self._start

    def left(self) -> float:
        """Seconds left; negative when more are spent than there were. Tells the progress."""
        self._tell()
        return self._seconds - self.spent()

    def share(self, share: float) -> Budget:
        """That share of what is left, from now on."""
        return Budget(share * max(self.left(), 0.0), self._tell)
