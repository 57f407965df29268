"""constraints.txt pins all that a development install brings, not only what pyproject.toml names."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).parents[1] / "constraints.txt"


def unpinned(requirement: str) -> set[str]:
    """Packages that an install brings, which must be here, without a pin."""
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line for line in lines)
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    needed = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        for text in metadata.requires(wanted.name) or []:
            found = Requirement(text)
            extras = wanted.extras or {""}
            if found.marker and not any(found.marker.evaluate({"extra": e}) for e in extras):
                continue
            if (key := str(found)) not in needed:
                needed.add(key)
                waiting.append(found)
    names = {canonicalize_name(Requirement(text).name) for text in needed} - {"memspan"}
    brought = {n for n in names if not n.startswith(("nvidia-", "cuda-")) and n != "triton"}
    assert len(brought) > 50
    return brought - pinned


def test_every_package_of_a_development_install_is_pinned() -> None:
    assert not unpinned("memspan[dev]"), "run make constraints"
