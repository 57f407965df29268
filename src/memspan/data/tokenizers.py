"""Tokenisers: bytes, characters, words and sub-words to ids and back. They are saved as plain JSON."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from memspan.data.options import refuse_oversized_vocabulary
from memspan.errors import MemspanError
from memspan.files.bytes import read_limited, write_atomically

LIMIT = 1 << 28
"""Bytes of a ``tokenizer.json`` at most."""
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
NO_ID = (1 << 32) - 1
"""In a table of ids, what has none."""
COUNTED = 1 << 22
"""Ids compared at once: a corpus may be larger than memory."""


class Tokenizer(ABC):
    """Text as bytes to ids in ``[0, vocab_size)``, and back."""

    kind: ClassVar[str]
    """Its name in :data:`KINDS`."""

    unknown: int | None = None
    """The id of everything that the vocabulary lacks; None if it covers every text."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Ids, 1-D, in the smallest unsigned type that holds the vocabulary.

        Raises:
            MemspanError: the text is not UTF-8, and the tokeniser needs that.
        """

    def encode_stream(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Encode a text that comes in chunks: its ids in order, in pieces of about the chunks' size.

        Raises:
            MemspanError: the text is not UTF-8, and the tokeniser needs that.
        """
        return (self.encode(piece) for piece in self.pieces(chunks))

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Cut a text that comes in chunks so that encoding the pieces gives the ids of the whole text.

        Raises:
            MemspanError: the text is not UTF-8, and the tokeniser needs that.
        """
        return (text.encode() for text in _cut_at_gaps(_decoded(chunks)))

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The text of ``ids``."""

    @property
    def opening(self) -> bytes:
        """What is read where there is no prompt: a line break, or the first token without one."""
        try:
            return b"\n" if len(self.encode(b"\n")) else self.decode([0])
        except MemspanError:
            return self.decode([0])

    def count_unknown(self, ids: np.ndarray) -> int:
        """How many of ``ids`` (1-D) are unknown, so that decoding cannot restore the text."""
        if self.unknown is None:
            return 0
        pieces = (ids[i : i + COUNTED] for i in range(0, len(ids), COUNTED))
        return sum(int(np.count_nonzero(piece == self.unknown)) for piece in pieces)

    @abstractmethod
    def content(self) -> dict[str, object]:
        """What :func:`load_tokenizer` passes to the constructor, as JSON values."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its ids."""
        return smallest_dtype(self.vocab_size)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of the kind and the vocabulary."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, with its own checksum."""
        value = {"sha256": self.vocabulary_hash, "tokenizer": json.loads(self._json())}
        text = json.dumps(value, ensure_ascii=False, indent=None)
        write_atomically(folder / "tokenizer.json", text.encode())

    def stream_decoder(self) -> StreamDecoder:
        """A decoder of ids that come one by one."""
        return StreamDecoder(self)

    def _json(self) -> str:
        return json.dumps({"kind": self.kind, **self.content()}, ensure_ascii=False, sort_keys=True)


class StreamDecoder:
    """Decodes ids one by one to text that can be shown at once: never half a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token: int) -> str:
        """The text that ``token`` completes; it may be empty."""
        piece = self._tokenizer.decode([token])
        # decode() puts spaces only between the words of one call.
        if self._tokenizer.kind == "words" and not self._first and piece != b"\n":
            piece = b" " + piece
        self._first = piece == b"\n"
        return self._utf8.decode(piece)


class ByteTokenizer(Tokenizer):
    """Ids are the bytes.

    Args:
        values: in vocabularies of others, the bytes that have an id, in the order of their ids (None:
            all, by value). If the line break is not among them, lines have no end; a text with any
            other byte is refused.
    """

    kind = "bytes"

    def __init__(self, values: list[int] | None = None) -> None:
        if values is not None and not _are_bytes(values):
            raise ValueError("its values are not each a different byte")
        self.values = values
        self._values = np.array(range(256) if values is None else values, dtype=np.uint8)
        self._ids = np.full(256, -1, dtype=np.int16)
        self._ids[self._values] = np.arange(len(self._values))

    @property
    def vocab_size(self) -> int:
        return len(self._values)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(text, dtype=np.uint8)
        if self.values is None:
            return codes
        if self._ids[ord("\n")] < 0:
            codes = codes[codes != ord("\n")]
        ids = self._ids[codes]
        if (ids < 0).any():
            raise MemspanError(
                f"the byte {codes[(ids < 0).argmax()]} is not in the vocabulary, which has nothing for "
                "other bytes: give a text of its bytes only"
            )
        return ids.astype(self.dtype)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return iter(chunks)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        if isinstance(ids, np.ndarray):
            # This may be a whole split: not byte by byte.
            codes = ids.astype(np.uint8)
        else:
            codes = np.fromiter(ids, dtype=np.uint8)
        return (codes if self.values is None else self._values[codes]).tobytes()

    def content(self) -> dict[str, object]:
        # Left out where it is as ever: files and checksums of older versions stay what they were.
        return {} if self.values is None else {"values": self.values}


class CharacterTokenizer(Tokenizer):
    """The characters of the training text, sorted; id 0 is every other character.

    Args:
        characters: in the order of their ids.
        others: without an id for other characters, as in vocabularies of others, ids begin with the
            first character's, and a text with any other is refused.
    """

    kind = "characters"

    def __init__(self, characters: str, others: bool = True) -> None:
        if not isinstance(characters, str) or len(set(characters)) != len(characters):
            raise ValueError("its characters are not each a different one")
        if not isinstance(others, bool):
            raise ValueError("its others is neither true nor false")
        # Refuses half of a surrogate pair.
        characters.encode()
        self.characters = characters
        codes = np.array([ord(c) for c in characters], dtype=np.int64)
        self.unknown = 0 if others else None
        self._ids = np.full(0x110000, 0 if others else NO_ID, dtype=np.uint32)
        self._ids[codes] = np.arange(others, len(codes) + others)

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + (self.unknown is not None)

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(_utf8(text).encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[codes]
        if self.unknown is None and (ids == NO_ID).any():
            other = chr(codes[(ids == NO_ID).argmax()])
            raise MemspanError(
                f"{other!r} is not in the vocabulary, which has nothing for other characters: give a "
                "text of its characters only"
            )
        return ids.astype(self.dtype)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        return (text.encode() for text in _decoded(chunks))

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        table = "\N{REPLACEMENT CHARACTER}" * (self.unknown is not None) + self.characters
        return "".join(table[i] for i in ids).encode()

    def content(self) -> dict[str, object]:
        # Likewise.
        return {"characters": self.characters} | ({"others": False} if self.unknown is None else {})


class WordTokenizer(Tokenizer):
    """Words between white space, most frequent first; the end of a line is a word, as in WikiText.

    Vocabularies of others may lack ``<eos>``, and lines then have no end, or ``<unk>``, and a word that
    is not among them is then refused; ``<UNK>`` is as good.

    Args:
        words: in the order of their ids.
        lower_case: read the text in lower case.
    """

    kind = "words"

    def __init__(self, words: list[str], lower_case: bool = False) -> None:
        if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
            raise ValueError("its words are not words")
        if not isinstance(lower_case, bool):
            raise ValueError("its lower_case is neither true nor false")
        self.words, self.lower_case = words, lower_case
        self._ids = {word: i for i, word in enumerate(words)}
        self.unknown = self._ids.get(UNKNOWN, self._ids.get(UNKNOWN.upper()))

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: bytes) -> np.ndarray:
        words = split_words(_utf8(text).lower().encode() if self.lower_case else text)
        if END_OF_LINE not in self._ids:
            words = (word for word in words if word != END_OF_LINE)
        get, unknown = self._ids.get, self.unknown
        if unknown is None:
            return np.fromiter(map(self._known, words), dtype=self.dtype)
        return np.fromiter((get(word, unknown) for word in words), dtype=self.dtype)

    def _known(self, word: str) -> int:
        if word not in self._ids:
            raise MemspanError(
                f"{word[:60]!r} is not in the vocabulary, which has no {UNKNOWN} for it: give a text "
                "of its words only"
            )
        return self._ids[word]

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        words = (self.words[i] for i in ids)
        lines = " ".join("\n" if w == END_OF_LINE else w for w in words)
        return lines.replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n").encode()

    def content(self) -> dict[str, object]:
        # Likewise.
        return {"words": self.words} | ({"lower_case": True} if self.lower_case else {})


class SubwordTokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016) by the ``tokenizers`` library."""

    kind = "subwords"

    def __init__(self, model: str) -> None:
        _check_subwords(json.loads(model))
        self._bpe = _subword_library().Tokenizer.from_str(model)

    @property
    def vocab_size(self) -> int:
        size: int = self._bpe.get_vocab_size()
        return size

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._bpe.encode(_utf8(text)).ids, dtype=self.dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        # Through the tokens' own bytes: a token may end inside a character.
        table = byte_level_bytes()
        tokens = (self._bpe.id_to_token(int(i)) for i in ids)
        return bytes(table[c] for token in tokens for c in token)

    def content(self) -> dict[str, object]:
        return {"model": self._bpe.to_str()}


KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (ByteTokenizer, CharacterTokenizer, WordTokenizer, SubwordTokenizer)
}


def tokenizer_class(kind: str) -> type[Tokenizer]:
    """The tokeniser named ``kind``.

    Raises:
        MemspanError: there is none of that name.
    """
    if kind not in KINDS:
        raise MemspanError(f"unknown tokenizer {kind!r}: use {', '.join(KINDS)}")
    return KINDS[kind]


def train_tokenizer(
    kind: str, documents: Iterable[bytes], vocab_size: int | None = None
) -> Tokenizer:
    """Make a tokeniser from training text.

    Args:
        kind: see :data:`KINDS`.
        documents: the text; a long document may come in :meth:`Tokenizer.pieces`. Its distinct
            characters or words are held in memory.
        vocab_size: maximum number of ids, for words and sub-words.

    Raises:
        MemspanError: text that is not UTF-8 where characters are needed; a missing extra; a
            vocabulary of sub-words that cannot hold the 256 bytes.
    """
    # The sub-word library allocates that many, and aborts the process where it cannot.
    refuse_oversized_vocabulary(vocab_size or 0)
    tokenizer_class(kind)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "characters":
        characters: set[str] = set()
        for document in documents:
            characters.update(_utf8(document))
        return CharacterTokenizer("".join(sorted(characters)))
    if kind == "words":
        counts: Counter[str] = Counter()
        for document in documents:
            counts.update(split_words(document))
        # The end of line and the unknown word always have an id.
        special = (END_OF_LINE, UNKNOWN)
        ranked = sorted(
            {*counts, *special}, key=lambda word: (word not in special, -counts[word], word)
        )[: max(vocab_size or 300_000, len(special))]
        return WordTokenizer(sorted(ranked, key=lambda word: (-counts[word], word)))
    if vocab_size is not None and vocab_size < 256:
        raise MemspanError(
            f"sub-words need a vocabulary of at least 256, one per byte, not {vocab_size}: "
            "raise --data.vocab-size"
        )
    library = _subword_library()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size or 8192,
        initial_alphabet=sorted(byte_level_bytes()),
        show_progress=False,
    )
    bpe.train_from_iterator((_utf8(d) for d in documents), trainer)
    return SubwordTokenizer(bpe.to_str())


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read ``tokenizer.json``.

    Raises:
        MemspanError: it is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        value = json.loads(read_limited(path, LIMIT))
        content = dict(value["tokenizer"])
        kind = content.pop("kind")
        tokenizer = KINDS[kind](**content)
        if tokenizer.vocabulary_hash != value["sha256"]:
            raise ValueError("its checksum is wrong")
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: restore it") from None
    except MemspanError:
        raise
    except Exception as error:
        # A damaged file may hold anything, and the sub-word library raises bare Exceptions.
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    except BaseException as error:
        # A panic in that library's Rust code is not an Exception; interrupts are passed on.
        if type(error).__name__ != "PanicException":
            raise
        raise MemspanError(f"{path} is damaged ({error}): restore it") from None
    return tokenizer


def read_library_tokenizer(path: Path) -> SubwordTokenizer:
    """A ``tokenizer.json`` of the library ``tokenizers``, with its ids.

    Its special tokens are not looked for in a text, which may hold their names. What it does beside
    splitting a text, such as padding or adding tokens at the start, is left out.

    Raises:
        MemspanError: it cannot be read, or is no byte-level BPE that splits like GPT-2: only such a one
            restores every byte, and can read a text in chunks.
    """
    try:
        value = json.loads(read_limited(path, LIMIT))
        for part in ("truncation", "padding", "post_processor", "decoder", "added_tokens"):
            value[part] = [] if part == "added_tokens" else None
        if value["model"]["type"] != "BPE":
            raise ValueError(f"it is {value['model']['type']}")
        if value["normalizer"] is not None:
            raise ValueError("it alters the text with a normalizer")
        # Older files leave the pattern out, which is then used.
        if not value["pre_tokenizer"].get("use_regex", True):
            raise ValueError("it does not split at words")
        refuse_oversized_vocabulary(len(value["model"]["vocab"]))
        return SubwordTokenizer(json.dumps(value))
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check its path") from None
    except MemspanError:
        raise
    except BaseException as error:
        # As in load_tokenizer.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{type(error).__name__} {error}".split()).removeprefix("ValueError ")[
            :200
        ]
        raise MemspanError(
            f"{path} is no tokenizer.json that can be used ({reason}): give a byte-level BPE that "
            "splits like GPT-2, or make one with --data.tokenizer subwords"
        ) from None


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and uint32 that holds every id.

    Raises:
        MemspanError: none does.
    """
    for kind in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise MemspanError(f"a vocabulary of {vocab_size:,} is too large: at most 2**32 ids")


def split_words(text: bytes) -> Iterable[str]:
    """The words of each line, followed by the end of the line; the last line may have no end."""
    lines = _utf8(text).split("\n")
    for n, line in enumerate(lines):
        yield from line.split()
        if n + 1 < len(lines):
            yield END_OF_LINE


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 in chunks, which may end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_bytes = 0
    for chunk in itertools.chain(chunks, [b""]):
        begun = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _not_utf8(n_bytes - begun + error.start) from None
        n_bytes += len(chunk)


def _cut_at_gaps(texts: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that end where a gap begins; a text without gaps is one piece."""
    held: list[str] = []
    rest = ""
    for text in texts:
        rest += text
        gap = _last_gap(rest)
        if gap is not None:
            yield "".join([*held, rest[:gap]])
            held, rest = [], rest[gap:]
        else:
            # Whether the text ends in a gap depends on the next character.
            held.append(rest[:-2])
            rest = rest[-2:]
    if held or rest:
        yield "".join([*held, rest])


def _last_gap(text: str) -> int | None:
    """Position of the last single space, tab or line break between two other characters.

    Neither a word nor the pattern by which byte-level BPE splits a text (Radford et al. 2019) crosses
    its left edge.
    """
    for n in range(len(text) - 2, 0, -1):
        if text[n] in " \t\n" and not (text[n - 1].isspace() or text[n + 1].isspace()):
            return n
    return None


def _are_bytes(values: object) -> bool:
    return (
        isinstance(values, list)
        and all(type(value) is int and 0 <= value < 256 for value in values)
        and len(set(values)) == len(values) > 0
    )


def _utf8(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error.start) from None


def _not_utf8(position: int) -> MemspanError:
    return MemspanError(
        f"the text is not UTF-8 (byte {position:,}): use --data.tokenizer bytes, or convert the text"
    )


def _subword_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MemspanError(
            "sub-words need the tokenizers library: pip install 'memspan[subwords]'"
        ) from None
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    return tokenizers


def _check_subwords(value: Any) -> None:
    """Refuse what :func:`train_tokenizer` never makes, such as patterns that may run for ever."""
    model, split = value["model"], value["pre_tokenizer"]
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder", "added_tokens")
    options = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if (
        any(value.get(name) for name in parts)
        or any(model.get(name) for name in (*options, "fuse_unk", "byte_fallback", "ignore_merges"))
        or (model["type"], split["type"]) != ("BPE", "ByteLevel")
        or split["add_prefix_space"] is not False
    ):
        raise ValueError("it is no plain byte-level BPE")
    vocabulary, letters = model["vocab"], set(byte_level_bytes())
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("its ids are not 0, 1, 2, ...")
    if not letters <= set(vocabulary) or not set("".join(vocabulary)) <= letters:
        raise ValueError("its tokens are not made of bytes")


def byte_level_bytes() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
