"""Tokenisers of the library transformers, from a model's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memspan.errors import MemspanError
from memspan.lab.data.tokenizers.base import Tokenizer, utf8
from memspan.lab.installed import require

FILES = ("tokenizer.json", "tokenizer_config.json")
"""A folder with a tokeniser has one of these; without, transformers makes an empty tokeniser."""


class PretrainedTokenizer(Tokenizer):
    """A tokeniser of transformers, which adds nothing to a text.

    Args:
        folder: in transformers' format.
        trust_remote_code: execute the code that is in it.
    """

    kind = "transformers"

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        require("transformers")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            # transformers does not define its own exceptions.
            reason = str(error)[:300]
            raise MemspanError(f"the tokeniser of {folder} cannot be loaded: {reason}") from error
        self.unknown = self._tokenizer.unk_token_id
        self._anchor = self.encode(b"a").tolist()
        whole = self._tokenizer("a")["input_ids"]
        n = len(self._anchor)
        at = next((i for i in range(len(whole)) if whole[i : i + n] == self._anchor), 0)
        self.prefix: tuple[int, ...] = tuple(whole[:at])
        """Ids that it puts before every text, such as a token for its beginning."""

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @staticmethod
    def pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
        # Others may read a text's beginning, or a long word, in their own way.
        yield b"".join(chunks)

    def encode(self, text: bytes) -> np.ndarray:
        ids = self._tokenizer(utf8(text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=self.dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        # After another token, or the space before a first word would be lost.
        before, whole = (
            self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            for tokens in (self._anchor, [*self._anchor, *map(int, ids)])
        )
        return whole[len(before) :].encode()

    def content(self) -> dict[str, object]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        rules = rules if backend is None else backend.to_str()
        return {"sha256": hashlib.sha256(rules.encode()).hexdigest()}
