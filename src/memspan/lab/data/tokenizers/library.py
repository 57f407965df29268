"""Tokenisers of the library ``tokenizers``: byte-pair encoding, WordPiece, Unigram, whole words."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from memspan.errors import MemspanError
from memspan.files.disk import read_limited
from memspan.lab.data.options import refuse_oversized_vocabulary, refuse_sentence_piece
from memspan.lab.data.tokenizers.base import LIMIT, Tokenizer, cut_at_gaps, decoded, utf8

LEFT_OUT = ("truncation", "padding", "post_processor", "added_tokens")
"""Steps of a file that are not part of splitting a text."""
SPACE = "\u2581"
"""The stand-in for a space of SentencePiece (Kudo and Richardson 2018)."""
AFTER_CUT = 1000
"""Characters behind a cut, or twice as many as a token or word may have, that decide whether it changes
tokens."""
MOST_TRIES = 4
"""Attempts to cut a text; after that many failures the rest stays whole."""
PROBE = 'A "small" Probe: 12 x 3.5 (of what\u2019s cut) -- it\'s so. \u00dcber \u6771\u4eac too !\n'
"""A sample text. A tokeniser that cannot cut it at each of its spaces gets every text whole."""
LONGEST = 4096
"""Maximum length of a token in characters."""
MOST_UNUSED = 1000
"""Maximum number of ids without a token, on top of as many as there are tokens."""
MOST_GROWTH = 64
"""Factor by which normalising or decoding may lengthen a text."""


class LibraryTokenizer(Tokenizer):
    """A ``tokenizer.json`` as :func:`read_library_tokenizer` prepares it.

    Decoding puts each token's own text after the one before it, so that ids may be decoded in pieces.
    A text whose case, spaces or rare characters the tokeniser drops is not restored: see
    :meth:`alters`.
    """

    kind = "library"

    def __init__(self, model: str) -> None:
        self._tokenizer = subword_library().Tokenizer.from_str(model)
        ids = self._tokenizer.get_vocab()
        self._size = max(ids.values()) + 1
        refuse_oversized_vocabulary(self._size)
        if len(set(ids.values())) < len(ids):
            raise ValueError("two of its tokens have the same id")
        if self._size > 2 * len(ids) + MOST_UNUSED:
            raise ValueError(f"it has {len(ids):,} tokens, and ids up to {self._size - 1:,}")
        if any(len(token) > LONGEST for token in ids):
            raise ValueError(f"it has a token of over {LONGEST:,} characters")
        # As the library understood it, with all that is left out in the file. It would write every id
        # up to the largest, so this comes after the limits.
        self._parts = json.loads(self._tokenizer.to_str())
        rules = self._parts["model"]
        if any(self._parts.get(name) for name in LEFT_OUT) or rules.get("dropout"):
            raise ValueError("it adds to a text, or splits it at random")
        if max(_growth(self._parts[name]) for name in ("normalizer", "decoder")) > MOST_GROWTH:
            raise ValueError(f"it makes a text over {MOST_GROWTH} times longer")
        # Unigram gives its number, the others its text.
        self.unknown = rules.get("unk_id", ids.get(rules.get("unk_token")))

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: bytes) -> np.ndarray:
        try:
            ids = self._tokenizer.encode(utf8(text)).ids
        # The library raises nothing narrower, and panics where a pattern needs too many steps.
        except BaseException as error:
            if isinstance(error, MemspanError) or not is_failure(error):
                raise
            if not isinstance(error, Exception):
                raise MemspanError(
                    f"a pattern of the tokeniser fails on a part of the text ({error}): such as on a "
                    "long run of spaces; shorten it, or take another tokeniser"
                ) from None
            raise MemspanError(
                f"the tokeniser has no token for a part of the text ({error}): use one with a token "
                "for unknown text, or with byte fallback"
            ) from None
        return np.asarray(ids, dtype=self.dtype)

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        held: list[str] = []
        n_tries = 0
        for text in cut_at_gaps(decoded(chunks), " "):
            if held and n_tries < MOST_TRIES and self._may_be_cut:
                before = "".join(held)
                ids, after = (self.encode(each.encode()) for each in (before, text[: self._after]))
                both = self.encode((before + text[: self._after]).encode())
                n_tries += 1
                # From where the tokeniser began to read, since what it does may depend on that.
                if np.array_equal(np.concatenate([ids, after]), both):
                    yield before.encode(), ids
                    held = []
                    n_tries = 0
            held.append(text)
        whole = "".join(held).encode()
        yield whole, self.encode(whole)

    @cached_property
    def _may_be_cut(self) -> bool:
        """True if a text may be cut at spaces, as far as :data:`PROBE` tells."""
        if any(part["type"] == "FixedLength" for part in _nested(self._parts["pre_tokenizer"])):
            return False
        try:
            whole = self.encode(PROBE.encode()).tolist()
            cuts = [
                (PROBE[:n].encode(), PROBE[n:].encode()) for n, c in enumerate(PROBE) if c == " "
            ]
            return all(
                [*self.encode(left).tolist(), *self.encode(right).tolist()] == whole
                for left, right in cuts
            )
        # Other texts may have a token for every character.
        except MemspanError:
            return False

    @cached_property
    def _after(self) -> int:
        word = self._parts["model"].get("max_input_chars_per_word", 0)
        longest = max(map(len, self._tokenizer.get_vocab()))
        return max(AFTER_CUT, 2 * longest, 2 * min(word, LONGEST))

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        return b"".join(map(self._texts.__getitem__, ids))

    def alters(self, text: bytes, ids: np.ndarray) -> bool:
        return self.decode(ids) != text

    @cached_property
    def _texts(self) -> list[bytes]:
        """Each id's text."""
        parts = [*_nested(self._parts["pre_tokenizer"]), *_nested(self._parts["decoder"])]
        kinds = {part["type"] for part in parts}
        replaced = [*parts, *_nested(self._parts["normalizer"])]
        marked = "Metaspace" in kinds or any(
            SPACE in (part.get("content"), *(part.get("pattern") or {}).values())
            for part in replaced
            if part["type"] == "Replace"
        )
        tokens = [self._tokenizer.id_to_token(n) or "" for n in range(self._size)]
        if "ByteLevel" in kinds:
            table = byte_level_bytes()
            return [
                bytes(table[c] for c in token) if table.keys() >= set(token) else token.encode()
                for token in tokens
            ]
        if marked:
            return [_of_sentence_piece(token) for token in tokens]
        # As it is after another, since a first one may lose its space.
        anchor = self.encode(b"a").tolist()[:1] or [0]
        before = self._decoded(anchor)
        return [
            self._decoded([*anchor, n])[len(before) :].encode() if token else b""
            for n, token in enumerate(tokens)
        ]

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def tokens(self) -> Sequence[str | int]:
        names = [self._tokenizer.id_to_token(n) for n in range(self._size)]
        return [n if name is None else name for n, name in enumerate(names)]

    def content(self) -> dict[str, object]:
        return {"model": self._tokenizer.to_str()}


class SubwordTokenizer(LibraryTokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016), which restores every byte."""

    kind = "subwords"

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        return Tokenizer.encoded(self, chunks)

    def alters(self, text: bytes, ids: np.ndarray) -> bool:
        return False


def train_subwords(documents: Iterable[bytes], vocab_size: int | None) -> SubwordTokenizer:
    """Train a tokeniser on text.

    See :func:`~memspan.lab.data.tokenizers.registry.train_tokenizer`."""
    if vocab_size is not None and vocab_size < 256:
        raise MemspanError(
            f"sub-words need a vocabulary of at least 256, one per byte, not {vocab_size}: "
            "raise --data.vocab-size"
        )
    library = subword_library()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size or 8192,
        initial_alphabet=sorted(byte_level_bytes()),
        show_progress=False,
    )
    bpe.train_from_iterator((utf8(d) for d in documents), trainer)
    return SubwordTokenizer(bpe.to_str())


def byte_level_bytes() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def is_failure(error: BaseException) -> bool:
    """True for errors that the library may raise: a panic in its Rust code is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def subword_library() -> Any:
    """The library ``tokenizers``."""
    try:
        import tokenizers
    except ImportError:
        raise MemspanError(
            "sub-words need the tokenizers library: pip install tokenizers"
        ) from None
    return tokenizers


def read_library_tokenizer(path: Path) -> Tokenizer:
    """A ``tokenizer.json`` of the library ``tokenizers``, with its ids.

    Everything but splitting a text is left out: padding, tokens at the start, the space that many put
    before a text, and tokens that were added to its vocabulary, which a text may contain literally.
    """
    refuse_sentence_piece(str(path))
    try:
        value = json.loads(read_limited(path, LIMIT))
        for name in LEFT_OUT:
            value[name] = [] if name == "added_tokens" else None
        value = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder")) | value
        if _is_byte_level(value):
            return SubwordTokenizer(json.dumps(value | {"decoder": None}))
        return LibraryTokenizer(json.dumps(_without_first_space(value)))
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check its path") from None
    except BaseException as error:
        if isinstance(error, MemspanError) or not is_failure(error):
            raise
        reason = " ".join(f"{type(error).__name__} {error}".split()).removeprefix("ValueError ")
        raise MemspanError(
            f"{path} is not a tokenizer.json that can be used ({reason[:200]}): give one that the "
            "library tokenizers wrote, or make one with --data.tokenizer subwords"
        ) from None


def _is_byte_level(value: Any) -> bool:
    """True for the byte-level BPE that :func:`train_subwords` makes, with nothing added."""
    model = value["model"]
    split = value["pre_tokenizer"] or {}
    letters = set(byte_level_bytes())
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        (model["type"], split.get("type")) == ("BPE", "ByteLevel")
        and not any(map(model.get, (*options, "fuse_unk", "byte_fallback", "ignore_merges")))
        and not value["normalizer"]
        and split["add_prefix_space"] is False
        # Older files leave the pattern out, which is then used.
        and split.get("use_regex", True)
        and letters <= set(model["vocab"])
        and set("".join(model["vocab"])) <= letters
        and max(model["vocab"].values()) + 1 == len(model["vocab"])
    )


def _without_first_space(value: dict[str, Any]) -> dict[str, Any]:
    """The tokeniser without the space that it adds before a text and removes again: texts are read in
    pieces. If spaces are removed first, each word keeps its own."""
    split = value["pre_tokenizer"] or {}
    normalizer = value["normalizer"]
    if split.get("type") == "Metaspace":
        for part in (split, *(p for p in _nested(value["decoder"]) if p["type"] == "Metaspace")):
            part |= {"prepend_scheme": "never"}
            part.pop("add_prefix_space", None)
    for part in _nested(split):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    kept = [step for step in steps if step["type"] != "Prepend"]
    if kept != steps:
        value["normalizer"] = {"type": "Sequence", "normalizers": kept}
        decoder = value["decoder"] or {}
        if "decoders" in decoder:
            decoder["decoders"] = [d for d in decoder["decoders"] if d["type"] != "Strip"]
    return value


def _nested(value: Any) -> Iterator[dict[str, Any]]:
    """The parts of a part, itself included."""
    if isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_nested, value))
    elif isinstance(value, dict):
        if "type" in value:
            yield value
        yield from _nested([inner for inner in value.values() if isinstance(inner, list)])


def _growth(steps: Any) -> int:
    """Factor by which the replacements of a normaliser or decoder may lengthen a text."""
    growth = 1
    for part in _nested(steps):
        if part["type"] == "Replace":
            pattern = part["pattern"]
            content = len(part["content"])
            if pattern.get("String"):
                growth *= max(1, -(-content // len(pattern["String"])))
            else:
                # One that matches nothing, between all characters.
                growth *= 1 + content
        elif part["type"] == "Prepend":
            growth += len(part["prepend"])
    return growth


def _of_sentence_piece(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
