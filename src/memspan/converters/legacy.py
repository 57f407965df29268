"""Model objects that torch saved before version 1.6, which ``torch.load(weights_only=True)`` refuses.

In that format the class of a module comes with its source code: ``("module", class, file, source)``.
Here each of these is replaced by the class alone, which is what torch itself makes of it; then the file
is as readable as any. The sources are dropped unread.
"""

from __future__ import annotations

import mmap
import pickletools
from pathlib import Path
from typing import IO, cast

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How such a file begins: a pickle of a number."""
PUTS = ("BINPUT", "LONG_BINPUT", "PUT")
GETS = ("BINGET", "LONG_BINGET", "GET")
BEFORE = 3
"""Pickles before that of the object: the number, the format's version, the system."""


def without_sources(path: Path) -> IO[bytes]:
    """The file at ``path`` without the sources of its modules, to be read from where it stands.

    Raises:
        ValueError: it is damaged.
    """
    with open(path, "rb") as file:
        # Only the pages that are written to are copied: tensors take no memory here.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    stream = cast(IO[bytes], content)
    for _ in range(BEFORE):
        for _ in pickletools.genops(stream):
            pass
    start = stream.tell()
    found = list(pickletools.genops(stream))
    stop = stream.tell()
    ends = [*(start_of for _, _, start_of in found[1:]), stop]
    steps = [
        (instruction.name, argument, content[begin:end])
        for (instruction, argument, begin), end in zip(found, ends, strict=True)
    ]
    head = content[:start] + _shortened(steps)
    # It ends where it did, right before the tensors, so it begins later.
    content[stop - len(head) : stop] = head
    stream.seek(stop - len(head))
    return stream


def _shortened(steps: list[tuple[str, object, bytes]]) -> bytes:
    texts: dict[object, object] = {}
    kept: list[bytes] = []
    mark = 0
    for n, (name, argument, code) in enumerate(steps):
        kept.append(code)
        if name == "MARK":
            mark = n
        elif name in PUTS and steps[n - 1][0].endswith("UNICODE"):
            texts[argument] = steps[n - 1][1]
        elif name == "BINPERSID":
            inside = [i for i in range(mark + 1, n) if steps[i][0] not in (*PUTS, "TUPLE")]
            kind, what, _ = steps[inside[0]] if inside else ("", None, b"")
            if (texts.get(what) if kind in GETS else what) != "module" or len(inside) != 4:
                continue
            # Of the tuple, the class and where it is remembered.
            _, own, file, _ = inside
            for i in (*range(mark, own), *range(file, n + 1)):
                kept[i] = b""
    return b"".join(kept)
