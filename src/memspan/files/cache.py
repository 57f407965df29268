"""Where memspan keeps what can be made or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """The folder of downloads, tokenised corpora and compiled loops.

    ``MEMSPAN_CACHE`` names it; otherwise it is in the system's own cache folder.
    """
    return Path(os.environ.get("MEMSPAN_CACHE") or platformdirs.user_cache_dir("memspan"))
