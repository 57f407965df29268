"""Read files of ``torch.save`` and ``pickle`` as data: nothing in them is executed.

A file is mapped into memory and its tensors are views of it, so false sizes allocate nothing. A
pickle's steps are followed before it is read, so that a small one cannot take long or much memory: its
keys are text and numbers, since tuples and sets can be made that hash slowly or alike.
"""

from __future__ import annotations

import functools
import io
import mmap
import pickle
import pickletools
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from memspan.errors import MemspanError
from memspan.files.disk import open_regular

ZIP = b"PK\x03\x04"
OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The beginning of a file of torch before version 1.6: a pickle of a number."""
TYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
INERT = re.compile(
    r"(argparse|torch\.nn|tokenizers|transformers|sacremoses"
    r"|(utils\.)?(mem_transformer|proj_adaptive_softmax|fp16_opt|data_utils|vocabulary))\..+"
    r"|(builtins|__builtin__)\.set|re\._compile"
)
"""Names of classes and functions in models, corpora and vocabularies: only their state is read."""
LIMIT = 1 << 25
"""Maximum size of a pickle in bytes; the vocabulary of WikiText-103 takes 10 million."""
MOST_STEPS = 1 << 21
"""Maximum number of steps of one kind, and of objects in the memo."""
MOST_OBJECTS = 1 << 19
"""Maximum number of steps that are not in :data:`SMALL`: each may take hundreds of bytes."""
MOST_VALUES = 1 << 23
"""Maximum number of values, those within another counted each time that it is held."""
MOST_LARGE = 1 << 12
"""Maximum number of integers of over 60 bits: they can be chosen such that all collide as keys."""
SMALL = frozenset((
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "NONE", "NEWTRUE", "NEWFALSE", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
))  # fmt: skip
"""Steps that make texts and numbers, put objects into the memo, or fill them."""
PLAIN = frozenset((
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "NONE", "NEWTRUE", "NEWFALSE",
))  # fmt: skip
"""Steps that make texts and numbers, which may be keys."""
KEYS = {"SETITEM": 2, "SETITEMS": 2, "DICT": 2, "ADDITEMS": 1, "FROZENSET": 1}
"""Steps that hash, and the stride of the keys among the values of each."""


class Inert:
    """Stands in for an object of another program's class: its state without its code."""

    __slots__ = ("state",)
    state: dict[str, Any]

    # Not in __init__: a pickle can make an object without it.
    def __new__(cls, *_: object) -> Self:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


class Entries(dict[str, Any]):
    """Stands in for other kinds of dicts."""

    def __new__(cls, given: Any = ()) -> Any:
        """Keep a dict, or make one from a list of pairs, as Python 2 wrote an OrderedDict."""
        if isinstance(given, dict):
            return given
        made = super().__new__(cls)
        for key, value in given:
            if type(key) is not str:
                raise ValueError("a key is not text")
            dict.__setitem__(made, key, value)
        # A pickle can name a list again and again: each entry is copied once.
        if given:
            given.clear()
        return made

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        """Attributes, such as the versions in a state dict, are dropped."""


class Stored:
    """Describes a tensor in a file that has not been read yet."""

    __slots__ = ("_storage", "_view")
    _storage: Any
    _view: tuple[Any, ...]

    def __new__(cls, storage: object, *view: object) -> Self:
        # A parameter is made of its tensor.
        if isinstance(storage, cls):
            return storage
        made = super().__new__(cls)
        made._storage = storage
        made._view = view
        return made

    def __setstate__(self, _: object) -> None:
        """A tensor has no attributes here, and a file cannot set these."""

    def tensor(self) -> Tensor:
        """A view of the mapped file.

        Raises:
            Exception: of many kinds: it is not where its file says, or larger.
        """
        file, (_, dtype, key, _, numel, *_) = self._storage
        offset, size, stride, *_ = self._view
        storage = file.storage(dtype, key, numel)
        tensor: Tensor = storage.as_strided(size, stride, offset)
        if tensor.numel() > numel:
            raise ValueError(f"{tensor.numel():,} values of the {numel:,} that are stored")
        return tensor


NAMES: dict[str, object] = {
    **dict.fromkeys(("collections.Counter", "collections.OrderedDict"), Entries),
    **dict.fromkeys(
        [f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "parameter")], Stored
    ),
    **{
        f"{home}.{name}Storage": dtype
        for home in ("torch", "torch.cuda")
        for name, dtype in TYPES.items()
    },
}
"""Stand-ins for the classes and functions in what torch saved."""


class Foreign(Exception):
    """Raised if a pickle names something that is not data; its argument is the name."""


def read(path: Path) -> Any:
    """The value in a file, with :class:`Stored` for its tensors.

    Raises:
        MemspanError: it is missing or damaged, or holds anything else.
    """
    try:
        with open_regular(path) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return _File(mapped).value(file)
    except FileNotFoundError:
        raise MemspanError(f"{path} is missing: put it there") from None
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
        raise MemspanError(
            f"{path} is damaged, or neither a pickle nor a file of torch.save ({reason(error)}): get "
            "it again"
        ) from None


def reason(error: Exception) -> str:
    """Describe the fault of a file in brief."""
    said = "" if isinstance(error, LookupError) else str(error)
    return said.partition("\n")[0][:120] or type(error).__name__


class _File:
    """A mapped file, and where its storages are."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        # By key: an element's bytes, as the pickle says; the storage's offset and size in the file.
        self.sizes: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def value(self, file: IO[bytes]) -> Any:
        """The file's value; ``file``: the same, open."""
        if self._content[: len(ZIP)] == ZIP:
            return self._zipped(file)
        if self._content[: len(OLD)] == OLD:
            return self._old()
        return self._unpickled(0)[0]

    def storage(self, dtype: torch.dtype, key: str, numel: int) -> Tensor:
        """All values of a storage, in one dimension."""
        start, size = self._places[key]
        if size != numel * dtype.itemsize:
            raise ValueError(f"{numel:,} values claimed for {size:,} bytes")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._content, dtype=dtype, count=numel, offset=start)

    def _zipped(self, file: IO[bytes]) -> Any:
        members = zipfile.ZipFile(file).infolist()
        places = {member.filename: self._place(member) for member in members}
        name = next(name for name in places if name.endswith("/data.pkl"))
        root = name.removesuffix("data.pkl")
        start, size = places.get(f"{root}byteorder", (0, 0))
        if self._content[start : start + size] == b"big":
            raise ValueError("saved on a big-endian machine")
        value, _ = self._unpickled(*places[name])
        self._places = {key: places[f"{root}data/{key}"] for key in self.sizes}
        return value

    def _place(self, member: zipfile.ZipInfo) -> tuple[int, int]:
        """Offset and size of a member of an archive."""
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename[:40]} is compressed, which torch.save never does")
        name, extra = struct.unpack_from("<HH", self._content, member.header_offset + 26)
        return member.header_offset + 30 + name + extra, member.file_size

    def _old(self) -> Any:
        """The format before torch 1.6: pickles one after another, then the storages."""
        at = 0
        for _ in ("number", "version", "system"):
            _, at = self._unpickled(at)
        value, at = self._unpickled(at)
        keys, at = self._unpickled(at)
        for key in keys:
            (numel,) = struct.unpack_from("<Q", self._content, at)
            self._places[key] = (at + 8, numel * self.sizes[key])
            at += 8 + numel * self.sizes[key]
        return value

    def _unpickled(self, start: int, size: int = LIMIT) -> tuple[Any, int]:
        """The value of the pickle that begins at ``start``, and where it ends."""
        content = self._content[start : start + min(size, LIMIT)]
        end = _end_of(content)
        value = _Unpickler(content[:end], self).load()
        _refuse_repetitions(value)
        return value, start + end


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes known here only."""

    def __init__(self, content: bytes, file: _File) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._file = file

    def find_class(self, module: str, name: str) -> object:
        # A class without __setstate__ could itself be changed by a pickle.
        full = f"{module}.{name}"
        found = Inert if INERT.fullmatch(full) else NAMES.get(full)
        if found is None:
            raise Foreign(full)
        return found

    def persistent_load(self, saved: Any) -> object:
        if saved[0] == "module":
            # A class with its source, before version 1.6.
            return saved[1]
        _, dtype, key, _, _, *view = saved
        if view not in ([], [None]) or not isinstance(key, str):
            raise ValueError("a storage inside another")
        self._file.sizes[key] = dtype.itemsize
        return self._file, saved


def _end_of(content: bytes) -> int:
    """The end of the pickle at the start of ``content``.

    Raises:
        ValueError: it does not end, or could take long or much memory.
    """
    counts: Counter[str] = Counter()
    stream = io.BytesIO(content)
    machine = _Machine()
    for step, argument, _ in pickletools.genops(stream):
        kind = step.name
        most = MOST_STEPS
        if kind == "LONG4" or ("PUT" in kind and (argument or 0) > MOST_STEPS):
            raise ValueError(f"a number in it is too large for {kind}")
        if kind not in SMALL:
            kind = "OBJECT"
            most = MOST_OBJECTS
        elif isinstance(argument, int) and argument.bit_length() > 60:
            kind = "LARGE"
            most = MOST_LARGE
        counts[kind] += 1
        if counts[kind] > most:
            raise ValueError(f"it has more than {most:,} steps of the kind {kind}")
        machine.make(step, argument)
    return stream.tell()


class _Machine:
    """The stack and the memo of a pickle while its steps are followed: of each value only whether it is
    a text or a number."""

    def __init__(self) -> None:
        self._stack: list[bool] = []
        self._marks: list[int] = []
        self._memo: dict[int, bool] = {}

    def make(self, step: pickletools.OpcodeInfo, argument: Any) -> None:
        """Make a step.

        Raises:
            ValueError: a key is neither text nor a number.
            LookupError: the stack or the memo lacks what the step takes.
        """
        name = step.name
        stack = self._stack
        if name == "MARK":
            self._marks.append(len(stack))
            stack.append(False)
        elif name == "DUP":
            stack.append(stack[-1])
        elif "PUT" in name or name == "MEMOIZE":
            self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif "GET" in name:
            stack.append(self._memo[int(argument)])
        else:
            to_mark, taken, given = _effects(step)
            first = (self._marks[-1] if to_mark else len(stack)) - taken
            if first < 0:
                raise LookupError
            hashed = (self._marks[-1] if to_mark else first) + 1
            if name in KEYS and not all(stack[hashed :: KEYS[name]]):
                raise ValueError("a key in it is neither text nor a number")
            del stack[first:]
            while self._marks and self._marks[-1] >= first:
                self._marks.pop()
            stack.extend([name in PLAIN] * given)


@functools.cache
def _effects(step: pickletools.OpcodeInfo) -> tuple[bool, int, int]:
    """Effects on the stack: if everything down to the last mark is taken, how many entries besides,
    and how many are added."""
    to_mark = pickletools.markobject in step.stack_before
    taken = step.stack_before.index(pickletools.markobject) if to_mark else len(step.stack_before)
    return to_mark, taken, len(step.stack_after)


def _refuse_repetitions(value: object) -> None:
    """Refuse a value in which small ones are held again and again, each holding others so.

    Raises:
        ValueError: whatever looks at all of it would take long.
    """
    sizes: dict[int, int] = {}
    # Without recursion: it may be nested to any depth. Each is met twice, the second time behind all
    # that is in it.
    waiting: list[tuple[object, bool]] = [(value, False)]
    while waiting:
        holder, is_counted = waiting.pop()
        inner = _inner(holder)
        if is_counted:
            # An object that holds itself counts once.
            sizes[id(holder)] = 1 + len(inner) + sum(sizes.get(id(each), 0) for each in inner)
            if sizes[id(holder)] > MOST_VALUES:
                raise ValueError(
                    f"it holds more than {MOST_VALUES:,} values, most of them repeated"
                )
        elif inner and id(holder) not in sizes:
            sizes[id(holder)] = 0
            waiting.append((holder, True))
            waiting.extend((each, False) for each in inner)


def _inner(holder: object) -> Sequence[object]:
    """The parts of a value."""
    if isinstance(holder, Inert):
        return [holder.state]
    if isinstance(holder, dict):
        return list(holder.values())
    return list(holder) if isinstance(holder, list | tuple | set | frozenset) else ()
