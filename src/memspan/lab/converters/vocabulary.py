"""The vocabularies of Transformer-XL checkpoints, as memspan's tokeniser of words.

A text is words between white space, each line followed by ``<eos>``: as the authors read WikiText-103,
which is distributed with its punctuation set apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memspan.errors import MemspanError
from memspan.files.disk import read_limited
from memspan.lab.converters.tensors import read_json
from memspan.lab.converters.torch_files import LIMIT, Inert, read
from memspan.lab.data.options import refuse_oversized_vocabulary
from memspan.lab.data.tokenizers.plain import WordTokenizer

FILES = ("vocab.pkl", "vocab.bin", "vocab.txt", "cache.pt")
"""Files that may hold the vocabulary, in order. The last is the authors' own, a whole corpus."""
SETTINGS = "tokenizer_config.json"


def read_vocabulary(folder: Path, vocab_size: int) -> tuple[WordTokenizer, list[str]]:
    """The tokeniser of the checkpoint in ``folder``, and lines for the user about it.

    A folder that was saved without any tokeniser gets words that are numbers.
    """
    path = next((folder / name for name in FILES if (folder / name).exists()), None)
    if path is None:
        return numbers(
            vocab_size,
            f"{folder} lacks its vocabulary: put {', '.join(FILES[:-1])} or {FILES[-1]} there (.txt: "
            "a word on each line, in the order of their ids)",
        )
    values = {"idx2sym": _lines(path)} if path.suffix == ".txt" else _values(path)
    if (folder / SETTINGS).exists():
        given = read_json(folder / SETTINGS)
        values |= {name: given[name] for name in ("lower_case", "delimiter") if name in given}
    if values.get("delimiter") is not None:
        raise MemspanError(
            f"{path} has a delimiter, but memspan splits words at white space: it cannot be converted"
        )
    lower_case = values.get("lower_case", False)
    if not isinstance(lower_case, bool):
        raise MemspanError(
            f"{path}: lower_case is neither true nor false: get the vocabulary again"
        )
    words = words_of(values, path)
    if len(words) != vocab_size:
        raise MemspanError(
            f"{path} has {len(words):,} words, and the model {vocab_size:,} embeddings: put the "
            "model's own vocabulary there"
        )
    return WordTokenizer(words, lower_case), []


def numbers(vocab_size: int, remedy: str) -> tuple[WordTokenizer, list[str]]:
    """A tokeniser whose words are ids, for a checkpoint that came without one, and a line about it.
    ``remedy``: what is missing, and what to do."""
    refuse_oversized_vocabulary(vocab_size)
    words = [str(number) for number in range(vocab_size)]
    return WordTokenizer(words), [
        f"{remedy}, and convert it again; until then texts are numbers, such as 0 1 2"
    ]


def words_of(values: dict[str, Any], path: Path) -> list[str]:
    """The words in the order of their ids, from what a vocabulary of the authors' kind holds:
    ``sym2idx``, from words to ids, or ``idx2sym``, the words in order. ``path``: for messages."""
    ids = values.get("sym2idx")
    words = values.get("idx2sym")
    # A tokeniser that transformers loaded and saved again has lost its idx2sym.
    if isinstance(ids, dict) and ids:
        if {*map(type, ids.values())} != {int} or sorted(ids.values()) != list(range(len(ids))):
            raise MemspanError(f"{path}: the ids in sym2idx are not 0, 1, 2 ...: get it again")
        words = sorted(ids, key=ids.__getitem__)
    if not isinstance(words, list) or not words:
        raise MemspanError(
            f"{path} has neither sym2idx nor idx2sym: put the model's vocabulary there"
        )
    try:
        "".join(words).encode()
    except (TypeError, UnicodeEncodeError):
        raise MemspanError(f"{path} has words that are not text: get it again") from None
    if len(set(words)) != len(words):
        raise MemspanError(f"{path} has the same word twice: get it again")
    return words


def _values(path: Path) -> dict[str, Any]:
    """The attributes of a vocabulary that ``pickle`` or ``torch`` saved."""
    values = read(path)
    if isinstance(values, Inert):
        values = getattr(values.state.get("vocab"), "state", values.state)
    if not isinstance(values, dict):
        raise MemspanError(f"{path} does not hold a vocabulary: put the model's there")
    return dict(values)


def _lines(path: Path) -> list[str]:
    """The first word of each line."""
    try:
        text = read_limited(path, LIMIT).decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MemspanError(f"cannot read {path} ({error}): check the file") from None
    lines = text.split("\n")
    if not all(line.strip() for line in lines):
        raise MemspanError(
            f"{path} has an empty line: each line is a word, in the order of their ids"
        )
    return [line.split(maxsplit=1)[0] for line in lines]
