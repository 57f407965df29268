"""Read files of ``torch.save`` and ``pickle`` as data: nothing in them is executed.

The standard library's unpickler makes the objects, but only of the classes and functions that are named
here; torch maps the tensors of a file into memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, Self

import torch

from memspan.errors import MemspanError
from memspan.files.disk import open_regular

LIMIT = 1 << 25
"""Maximum size of a pickle in bytes; the vocabulary of WikiText-103 takes 10 million."""
MOST_STEPS = 1 << 22
"""Maximum number of steps of a pickle: each may make an object, of a hundred bytes or so."""
MOST_TUPLES = 1 << 14
"""Maximum number of tuples: a key may nest them, and Python hashes these at any depth."""
ZIP = b"PK\x03\x04"
OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file of torch before version 1.6 begins: a pickle of a number, with four more behind it."""
INERT = re.compile(
    r"(argparse|torch\.nn|tokenizers|transformers|sacremoses"
    r"|(utils\.)?(mem_transformer|proj_adaptive_softmax|fp16_opt|data_utils|vocabulary))\..+"
    r"|(builtins|__builtin__)\.set|re\._compile"
)
"""Names of classes and functions in models, corpora and vocabularies: only their state is read."""


class Inert:
    """Stands in for an object of another program's class: its state without its code."""

    __slots__ = ("state",)
    state: dict[str, Any]
    dump_patches = False
    """What torch asks a class whose source is in an old file."""

    # Not in __init__: a pickle can make an object without it.
    def __new__(cls, *_: object) -> Self:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


class Entries(dict[Any, Any]):
    """Stands in for other kinds of dicts."""

    # Without it, a pickle could change the class.
    def __setstate__(self, _: object) -> None:
        """Attributes, such as the versions in a state dict, are dropped."""


NAMES: dict[str, object] = {
    "collections.Counter": Entries,
    "collections.OrderedDict": Entries,
    "torch._utils._rebuild_tensor": torch._utils._rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
}
"""The classes and functions in what torch saved. It finds the types of storages by itself."""


class Foreign(Exception):
    """A pickle names something that is not data; its argument is the name."""


class Unpickler(pickle.Unpickler):
    """Makes objects of the known classes only."""

    def find_class(self, module: str, name: str) -> object:
        """What stands for a class or function."""
        full = f"{module}.{name}"
        found = Inert if INERT.fullmatch(full) else NAMES.get(full)
        if found is None:
            raise Foreign(full)
        return found


def load(file: IO[bytes], **options: Any) -> Any:
    """As ``pickle.load``. With it and :class:`Unpickler`, this module replaces pickle in torch."""
    return Unpickler(file, **options).load()


def read(path: Path) -> Any:
    """The value in a file."""
    try:
        with open_regular(path) as file:
            start = file.read(LIMIT)
            zipped, old = start.startswith(ZIP), start.startswith(OLD)
            _check_pickles(_pickle_of(file) if zipped else start, 5 if old else 1)
        if old and tarfile.is_tarfile(path):
            raise ValueError("it is a tar archive, which torch would unpack")
        if not zipped and not old:
            return load(io.BytesIO(start), encoding="utf-8")
        with warnings.catch_warnings():
            # Old files have the source of classes, with which theirs here would be compared.
            warnings.simplefilter("ignore")
            return torch.load(path, "cpu", sys.modules[__name__], weights_only=False, mmap=zipped)
    except OSError as error:
        raise MemspanError(f"cannot read {path} ({error.strerror}): check the file") from None
    except Foreign as error:
        raise MemspanError(
            f"{path} holds {str(error)[:100]}, which is neither plain data nor a dense tensor and "
            "could run a program, so the file is not read: get it from a source that you trust, and "
            "save it again without that"
        ) from None
    except Exception as error:
        # A damaged file may raise anything.
        reason = str(error).partition("\n")[0][:120]
        raise MemspanError(
            f"{path} is damaged, or neither a pickle nor a file of torch.save "
            f"({reason or type(error).__name__}): get it again"
        ) from None


def _pickle_of(file: IO[bytes]) -> bytes:
    """The pickle in an archive that torch saved."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is compressed, which torch.save never does")
        if any(member.filename.endswith("/constants.pkl") for member in members):
            raise ValueError("it is a TorchScript program")
        found = next(member for member in members if member.filename.endswith("/data.pkl"))
        with archive.open(found) as pickled:
            return pickled.read(LIMIT)


def _check_pickles(content: bytes, n: int) -> None:
    """Refuse pickles that could take very much memory, or crash Python."""
    stream, steps, tuples = io.BytesIO(content), 0, 0
    for _ in range(n):
        for step, argument, _ in pickletools.genops(stream):
            steps += 1
            tuples += step.name.startswith("TUPLE")
            # The memo has a place for every number up to the largest.
            place = argument if isinstance(argument, int) and "PUT" in step.name else 0
            if step.name == "LONG4" or max(steps, place) > MOST_STEPS or tuples > MOST_TUPLES:
                raise ValueError("its pickle is too large")
