"""The memory value: its operations, its file, and what it says to a bad file."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from architectures import CASES
from memspan.errors import MemspanError
from memspan.files.tensors import save_tensors
from memspan.memory import Memory, concatenate
from memspan.models import TransformerXLMemory
from readings import assert_memories_equal, fields

FINGERPRINT = "f" * 64


@dataclasses.dataclass(frozen=True)
class Other(Memory):
    weights: Tensor


def memory(batch: int = 3) -> TransformerXLMemory:
    generator = torch.Generator().manual_seed(0)
    return TransformerXLMemory(
        tokens_seen=torch.tensor([7, 2, 0])[:batch],
        hidden=torch.randn(batch, 2, 4, 3, generator=generator),
        length=torch.tensor([4, 2, 0])[:batch],
    )


def test_rows_are_picked_as_of_a_tensor() -> None:
    m = memory()
    for rows, same in (
        (0, [0]),
        (-1, [2]),
        (slice(1, None), [1, 2]),
        ([2, 2], [2, 2]),
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([True, False, True]), [0, 2]),
    ):
        for name, tensor in fields(m).items():
            assert torch.equal(fields(m[rows])[name], tensor[same]), name
            assert torch.equal(fields(m.select(same))[name], tensor[same]), name
    assert len(m) == 3
    assert_memories_equal(concatenate(m), m)
    assert_memories_equal(concatenate([m[1:], m[:1], m[[]]]), m.select([1, 2, 0]))
    with pytest.raises(IndexError):
        m[3]


def test_memories_of_different_models_are_not_concatenated() -> None:
    m = memory()
    with pytest.raises(MemspanError, match="a TransformerXLMemory and an Other"):
        concatenate([m, Other(m.tokens_seen, torch.zeros(3, 2))])
    with pytest.raises(MemspanError, match=r"hidden is float32 \[3, 2, 3, 3\] on cpu, not float32"):
        concatenate([m, dataclasses.replace(m, hidden=m.hidden[:, :, 1:])])
    with pytest.raises(MemspanError, match="at least one"):
        concatenate([])


def test_a_printed_memory_is_one_short_line() -> None:
    """Not its tensors, whatever the architecture."""
    assert repr(memory()) == "TransformerXLMemory(3 rows, 0 to 7 tokens seen, 336 bytes)"
    assert memory().nbytes == 336
    assert "(0 rows, tokens seen, " in repr(memory().select([]))
    assert "(1 row, 7 tokens seen, " in repr(memory().select([0]))
    assert "(3 rows, tokens seen, " in repr(memory().to("meta"))
    for case in CASES.values():
        assert len(repr(case.shared_model().initial_memory(2))) < 80


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fields_are_dense_tensors() -> None:
    nested = torch.nested.nested_tensor(list(memory().hidden))
    for field, tensor in fields(memory()).items():
        for wrong in (tensor.tolist(), None, tensor.to_sparse(), nested):
            with pytest.raises(MemspanError, match=f"a memory's {field} must be a "):
                dataclasses.replace(memory(), **{field: wrong})


def test_to_converts_floats_only() -> None:
    m = memory().to(dtype=torch.float64)
    assert m.hidden.dtype == torch.float64
    assert m.length.dtype == m.tokens_seen.dtype == torch.int64
    assert_memories_equal(memory().to(torch.float64), m)
    assert_memories_equal(memory().to("cpu", torch.bfloat16), memory().to(torch.bfloat16))
    assert {t.device.type for t in fields(memory().to("meta")).values()} == {"meta"}
    assert_memories_equal(memory().to(), memory())


@pytest.mark.parametrize("mask", [[True, False, False], torch.tensor([True, False, False])])
def test_reset_empties_the_marked_rows(mask: list[bool] | Tensor) -> None:
    before = memory()
    before.hidden[0, 0, 0, 0] = float("nan")  # a poisoned row is to be forgotten too
    before.hidden.requires_grad_()
    after = before.reset(mask)
    for tensor in fields(after).values():
        assert not tensor[0].any()
    assert_memories_equal(after.select([1, 2]), memory().select([1, 2]))
    assert before.tokens_seen.tolist() == [7, 2, 0]
    after.hidden.sum().backward()
    assert before.hidden.grad.flatten(1).unique(dim=1).tolist() == [[0], [1], [1]]
    assert not any(t.requires_grad for t in fields(after.detach()).values())
    none = memory().select([])
    assert_memories_equal(none.reset([]), none)
    whole = memory()
    for new in (whole.select([0, 1, 2]), whole.reset([False] * 3)):
        for name, tensor in fields(new).items():
            assert tensor.data_ptr() != fields(whole)[name].data_ptr(), name


# ----- Files


@pytest.mark.parametrize(("kind", "dtype"), [(str, torch.float64), (Path, torch.bfloat16)])
def test_save_and_load(tmp_path: Path, dtype: torch.dtype, kind: type) -> None:
    """Fields may be one tensor (an empty memory's counts), a view, or part of a graph."""
    path = tmp_path / "folder" / "book.memory"
    counts = torch.tensor([0, 0])
    hidden = torch.randn(4, 2, 4, 3, requires_grad=True)[::2].transpose(2, 3)
    m = TransformerXLMemory(tokens_seen=counts, hidden=hidden, length=counts).to(dtype)
    m.save(kind(path), FINGERPRINT)
    assert_memories_equal(TransformerXLMemory.load(kind(path), FINGERPRINT), m.detach())
    assert [p.name for p in path.parent.iterdir()] == ["book.memory"]


def test_save_replaces_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    memory().save(path, FINGERPRINT)
    memory(2).save(path, FINGERPRINT)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MemspanError, match="No space left"):
        memory().save(path, FINGERPRINT)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert_memories_equal(TransformerXLMemory.load(path, FINGERPRINT), memory(2))


def refused(
    path: Path, fingerprint: str = FINGERPRINT, kind: type[Memory] = TransformerXLMemory
) -> str:
    """Loading fails with one line that names the file."""
    with pytest.raises(MemspanError) as caught:
        kind.load(path, fingerprint)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_another_models_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    memory().save(path, FINGERPRINT)
    assert "another model" in refused(path, "0" * 64)
    assert "is a TransformerXLMemory, and this model's is a Other" in refused(path, kind=Other)
    header = {"kind": "TransformerXLMemory", "fingerprint": FINGERPRINT}
    save_tensors(path, {"hidden": torch.zeros(1, 1, 1, 1)}, header)
    with pytest.raises(MemspanError, match="fields"):
        TransformerXLMemory.load(path, FINGERPRINT)


def test_foreign_files_are_neither_read_nor_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert "missing" in refused(path)
    assert "missing" in refused(tmp_path)
    # Ours, but a checkpoint's.
    save_tensors(path, {"weight": torch.zeros(2)}, {"step": "1"})
    others = {
        b"x": "damaged",
        b"no safetensors\n" * 40: "damaged",
        b"\x80\x05K\x01.": "damaged",
        save({"weight": torch.zeros(2)}, {"fingerprint": FINGERPRINT}): "",
        path.read_bytes(): "not a memory",
    }
    for content, says in others.items():
        path.write_bytes(content)
        assert says in refused(path)
        for other in (path, link, tmp_path):
            with pytest.raises(MemspanError, match="exists and is not a memory file"):
                memory().save(other, FINGERPRINT)
        assert path.read_bytes() == content
    path.write_bytes(b"")
    assert "damaged" in refused(path)


def test_damage_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """A file that ends early, one that goes on, and any bit that is flipped."""
    path = tmp_path / "m"
    memory(1).save(path, FINGERPRINT)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[:size] for size in (0, 4, 8, 9, header - 1, header, header + 1, -1)]
    damaged.append(whole + b"\0")
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        refused(path)
