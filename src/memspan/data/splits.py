"""A text divided into training, validation and test."""

from __future__ import annotations

import hashlib

from memspan.data.texts import Text

Splits = dict[str, list[Text]]
"""Split name -> documents."""


def by_file(files: list[tuple[str, list[Text]]]) -> Splits:
    """About 90/5/5 of the files, by a hash of their names."""
    splits: Splits = {"train": [], "validation": [], "test": []}
    for name, documents in files:
        bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20
        splits[{0: "validation", 1: "test"}.get(bucket, "train")] += filter(len, documents)
    if all(splits.values()):
        return splits
    return by_position([text for _, documents in files for text in documents])


def by_document(documents: list[Text]) -> Splits:
    """About 90/5/5 of the bytes in order, whole documents; cut where a split would have none."""
    total = sum(map(len, documents))
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in filter(len, documents):
        share = 100 * start // total
        splits["train" if share < 90 else "validation" if share < 95 else "test"].append(document)
        start += len(document)
    return splits if all(splits.values()) else by_position(documents)


def by_position(documents: list[Text]) -> Splits:
    """90/5/5 of the concatenated bytes; a document may be cut between two splits."""
    total = sum(map(len, documents))
    edges = (0, total * 90 // 100, total * 95 // 100, total)
    splits: Splits = {"train": [], "validation": [], "test": []}
    start = 0
    for document in documents:
        for split, low, high in zip(splits, edges, edges[1:], strict=False):
            # No split starts inside a UTF-8 character.
            piece = document.part(
                _character_start(document, low - start), _character_start(document, high - start)
            )
            if len(piece):
                splits[split].append(piece)
        start += len(document)
    return splits


def _character_start(document: Text, position: int) -> int:
    """``position``, or up to three bytes later where a UTF-8 character begins."""
    if position <= 0:
        # The document begins here, whatever its first byte is.
        return 0
    if position >= len(document):
        return len(document)
    following = document.part(position, position + 4).read()
    for n, byte in enumerate(following):
        if byte & 0xC0 != 0x80:
            return position + n
    # No character is longer, so this is not UTF-8, unless the text ends before.
    return position if len(following) == 4 else len(document)
