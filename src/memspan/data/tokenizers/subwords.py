"""Sub-words as ids, by the library ``tokenizers``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from memspan.data.tokenizers.base import Tokenizer, utf8
from memspan.errors import MemspanError


class SubwordTokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016) by the ``tokenizers`` library."""

    kind = "subwords"

    def __init__(self, model: str) -> None:
        _check_subwords(json.loads(model))
        self._bpe = subword_library().Tokenizer.from_str(model)

    @property
    def vocab_size(self) -> int:
        size: int = self._bpe.get_vocab_size()
        return size

    def encode(self, text: bytes) -> np.ndarray:
        return np.asarray(self._bpe.encode(utf8(text)).ids, dtype=self.dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        # Through the tokens' own bytes: a token may end inside a character.
        table = byte_level_bytes()
        tokens = (self._bpe.id_to_token(int(i)) for i in ids)
        return bytes(table[c] for token in tokens for c in token)

    def content(self) -> dict[str, object]:
        return {"model": self._bpe.to_str()}


def train_subwords(documents: Iterable[bytes], vocab_size: int | None) -> SubwordTokenizer:
    """Make one from training text; see :func:`~memspan.data.tokenizers.registry.train_tokenizer`."""
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
        # Older files leave the pattern out, which is then used.
        or not split.get("use_regex", True)
    ):
        raise ValueError("it is not plain byte-level BPE")
    vocabulary, letters = model["vocab"], set(byte_level_bytes())
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("its ids are not 0, 1, 2, ...")
    if not letters <= set(vocabulary) or not set("".join(vocabulary)) <= letters:
        raise ValueError("its tokens are not made of bytes")


def is_failure(error: BaseException) -> bool:
    """Whether the sub-word library raised it: a panic in its Rust code is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def subword_library() -> Any:
    """The library ``tokenizers``."""
    try:
        import tokenizers
    except ImportError:
        raise MemspanError(
            "sub-words need the tokenizers library: pip install tokenizers"
        ) from None
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    return tokenizers
