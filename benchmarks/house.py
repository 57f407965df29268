"""Draw ``docs/house.svg``: the package as the contract of imports in ``pyproject.toml`` has it.

    make house

Each layer is a row, in which nothing imports a neighbour; a room's number is its lines of Python. The
picture is one column, so that it can be read on a telephone, too.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import memspan
from plots import colours

PACKAGE = Path(memspan.__file__).parent
ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "house.svg"
WIDTH = 384
GAP = 6
LINE = 16
HEAD = 40
STYLE = """.room{fill:var(--panel);stroke:var(--soft)}
text{font-family:-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif;fill:var(--ink)}
.n{font-size:13.5px;font-weight:600}.s{font-size:13.2px;fill:var(--soft)}
.line{stroke:var(--soft);stroke-width:2}.head{fill:var(--soft)}
"""


def lines_of(path: Path) -> int:
    """All lines of a file, or of the Python files in a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def rooms() -> dict[str, int]:
    """Lines of Python in each file and folder of the package and of its lab."""
    places = [*sorted((PACKAGE / "lab").iterdir()), *sorted(PACKAGE.iterdir())]
    found = (path for path in places if path.suffix == ".py" or path.is_dir())
    return {path.stem: n for path in found if (n := lines_of(path))}


def layers() -> list[list[str]]:
    """The rooms from top to bottom, the lab's first; those of a layer do not import one another."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = [c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    core, lab = sorted(contracts, key=lambda contract: contract["containers"])
    stack = [layer for layer in [*lab["layers"], *core["layers"]] if layer != "lab"]
    return [[room.strip() for room in layer.split("|")] for layer in stack]


def in_words(n: int) -> str:
    """Lines to two digits."""
    return f"{round(n, 2 - len(str(n))):,}"


def parts(room: str) -> list[str]:
    """The packages inside a room, with their lines."""
    folders = (path.parent for path in sorted((PACKAGE / room).glob("*/__init__.py")))
    return [f"{folder.name} {in_words(lines_of(folder))}" for folder in folders]


def drawn() -> str:
    """The picture."""
    lines = rooms()
    body = []
    y = 24
    for layer in layers():
        width = (WIDTH - GAP * (len(layer) - 1)) / len(layer)
        height = HEAD + LINE * max(len(parts(room)) for room in layer)
        for n, room in enumerate(layer):
            x = 2 + n * (width + GAP)
            middle = x + width / 2
            body.append(
                f'<rect class="room" x="{x:g}" y="{y}" width="{width:g}" height="{height}" rx="4"/>'
            )
            for line, text in enumerate([room, in_words(lines[room]), *parts(room)]):
                body.append(
                    f'<text class="{"s" if line else "n"}" x="{middle:g}" y="{y + 16 + LINE * line}" '
                    f'text-anchor="middle">{text}</text>'
                )
        y += height + GAP
    x = WIDTH + 14
    svg = "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 22} {y}" '
            f'width="{WIDTH + 22}" height="{y}" role="img" aria-labelledby="title desc">',
            '<title id="title">The modules of memspan</title>',
            '<desc id="desc">The layers of the package from top to bottom, with the lines of Python in '
            "each module. Modules import only those below them.</desc>",
            f"<style>\n{colours.block(set())}{STYLE}</style>",
            '<text class="s" x="2" y="14">modules import only those below them; lines of Python</text>',
            f'<path class="line" d="M{x} 24V{y - 14}"/>',
            f'<path class="head" d="M{x - 6} {y - 16}h12l-6 10z"/>',
            *body,
            "</svg>\n",
        ]
    )
    return colours.coloured(svg)


def main() -> None:
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(f"drawn: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
