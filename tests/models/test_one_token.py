"""One token in one call to C: Transformer-XL and Compressive equal PyTorch's reader and the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from architectures import compressive, transformer_xl
from golden import assert_same
from memspan.models.language_model import Reader
from memspan.ops.native import compiler, threads
from memspan.ops.relative_step import compiled as relative_step
from readings import assert_memories_equal, some_memory, text

CASES = {
    "xl": transformer_xl(),
    "xl-learned-gelu": transformer_xl(
        positions="learned", max_distance=60, activation="gelu", attention_bias=True
    ),
    "xl-wide-heads": transformer_xl(n_heads=3, d_head=32, clamp_length=3, final_norm=False),
    "xl-wider-heads": transformer_xl(d_head=64, d_model=24, d_ff=23, n_layers=1),
    "xl-no-memory": transformer_xl(memory_length=0, tie_position_biases=True),
    "xl-fixed": transformer_xl(attention_span="fixed"),
    "xl-fixed-one": transformer_xl(attention_span="fixed", memory_length=1),
    "xl-gated": transformer_xl(gating="gru", d_ff=4, attention_bias=True),
    "convolution": compressive(),
    "mean-gated": compressive(compression="mean", gating="gru", activation="gelu"),
    "mean-gelu": compressive(compression="mean", activation="gelu", auxiliary_loss="none"),
    "max-learned": compressive(
        compression="max", positions="learned", max_distance=60, attention_bias=True
    ),
    "dilated": compressive(compression="dilated-convolution", compression_rate=3),
    "most-used": compressive(compression="most-used", auxiliary_loss="none"),
    "most-used-fixed": compressive(
        compression="most-used", auxiliary_loss="none", attention_span="fixed"
    ),
    "none": compressive(compressed_length=0),
}
# A buffer has room for 64 tokens more than there are slots: it moves among the last ones.
PARTS = [1, 1, 1, 7, 1, 45, *[1] * 12, 2, 1]


@pytest.fixture(autouse=True)
def _a_compiler() -> None:
    if not relative_step.available(torch.zeros(())):
        pytest.skip("no C compiler")


def in_pytorch(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A reader that reads on from the same memory without the step in C."""
    pytorch = reader._model.reader(reader.memory)
    monkeypatch.setattr(pytorch._backbone, "_compiles", lambda bf16_weights: False)
    return pytorch


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    + [(name, torch.float32) for name in ("xl", "xl-wide-heads", "xl-gated", "most-used")],
)
def test_as_the_model_and_as_pytorch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different ages, single tokens between segments, past the ends of memory and buffer."""
    case = CASES[name]
    model, tokens = case.model(dtype), text(5, sum(PARTS))
    outer = model.backbone.layers[0].feed_forward.outer.weight
    outer.data = outer.data.t().contiguous().t()
    memory = some_memory(model, 5)
    reader = model.reader(memory)
    assert reader._backbone._step is not None
    pytorch = in_pytorch(reader, monkeypatch)
    assert pytorch._backbone._step is None
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for n, part in enumerate(tokens.split(PARTS, 1)):
        out = model(part, memory)
        memory = out.memory
        found = reader.read(part)
        assert_same(found, out.logits, tolerance, "logits")
        assert_same(found, pytorch.read(part), tolerance, "logits")
        if n % 4 == 0:
            assert_memories_equal(reader.memory, memory, tolerance)
    assert_memories_equal(reader.memory, pytorch.memory, tolerance)


@torch.no_grad()
def test_without_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-norm, adapters, float16, documents, and MEMSPAN_COMPILE=0 are left to PyTorch."""

    def refuse(*_: object) -> None:
        raise AssertionError("the step in C was called")

    monkeypatch.setattr(relative_step.CompiledStep, "read", refuse)
    transformer_xl(normalisation="post").model().reader().read(text(1, 1))
    adapted = transformer_xl().model()
    torch.nn.utils.parametrizations.weight_norm(adapted.backbone.layers[1].feed_forward.inner)
    adapted.reader().read(text(1, 1))
    model = transformer_xl().model(torch.float32)
    reader = model.reader()
    reader.read(text(1, 1), starts=torch.ones(1, 1, dtype=torch.bool))
    with torch.autocast("cpu", torch.float16):
        reader.read(text(1, 1))
    with pytest.raises(AssertionError, match="was called"):
        reader.read(text(1, 1))
    monkeypatch.setattr(compiler, "functions", compiler.functions.__wrapped__)
    monkeypatch.setenv("MEMSPAN_COMPILE", "0")
    model.reader().read(text(1, 1))


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_autocast_rounds_the_weights_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that has such weights reads the same in float32."""
    model = CASES[name].model(torch.float32).backbone
    rounded = copy.deepcopy(model)
    for part_name, part in rounded.named_modules():
        name_of_part = part_name.split(".")[-1]
        product = name_of_part in ("query", "key", "value", "output", "inner", "outer")
        if product or name_of_part.startswith("of_"):
            part.weight.copy_(part.weight.bfloat16())
    tokens = torch.randn(5, 60, model.config.d_model).split(1, 1)
    other = rounded.reader(None, 5)
    expected = torch.cat([other.read(token) for token in tokens], 1)
    with torch.autocast("cpu", torch.bfloat16):
        reader = model.reader(None, 5)
        monkeypatch.setattr(type(reader), "_step", None)
        found = torch.cat([reader.read(token) for token in tokens], 1)
    assert_same(found, expected, 2e-5, "hidden")
    assert_memories_equal(reader.memory, other.memory, 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["xl", "xl-learned-gelu", "most-used"])
def test_autocast_may_end_and_begin(name: str) -> None:
    model = CASES[name].model(torch.float32).backbone
    tokens = torch.randn(5, 30, model.config.d_model).split(1, 1)
    expected = model.reader(None, 5)
    with torch.autocast("cpu", torch.bfloat16):
        reader = model.reader(None, 5)
    for n, token in enumerate(tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=n % 3 == 0):
            found = reader.read(token)
        assert_same(found, expected.read(token), 0.1, "hidden")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digits_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    """Products take several panels of weights at once for few rows, up to six rows for many."""
    model = transformer_xl(d_model=40, n_heads=5, d_ff=100).model(dtype)
    tokens = torch.randn(9, 3, 40, dtype=dtype)

    def read(rows: Tensor) -> Tensor:
        reader = model.backbone.reader(None, len(rows))
        return torch.cat([reader.read(token) for token in rows.split(1, 1)], 1)

    expected = torch.cat([read(row) for row in tokens.split(1)])
    assert_same(expected, model.backbone(tokens).hidden, 1e-5, "hidden")
    for n_rows in range(2, 10):
        assert torch.equal(read(tokens[:n_rows]), expected[:n_rows]), n_rows


@torch.no_grad()
def test_rows_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of different ages, each thread with its own."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = CASES["most-used"].model()
    reader = model.reader(some_memory(model, 15))
    pytorch = in_pytorch(reader, monkeypatch)
    for tokens in text(15, 6).split(1, 1):
        assert_same(reader.read(tokens), pytorch.read(tokens), 1e-12, "logits")
    assert_memories_equal(reader.memory, pytorch.memory, 1e-12)


@torch.no_grad()
def test_autocast_with_parameters_of_several_types() -> None:
    for case in (transformer_xl(), compressive()):
        model = case.model(torch.float32)
        for part in model.backbone.modules():
            if isinstance(part, nn.Linear):
                part.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            reader, tokens = model.reader(), text(1, 4)
            found = torch.cat([reader.read(token) for token in tokens.split(1, 1)], 1)
            assert_same(found.float(), model(tokens).logits.float(), 0.1, "logits")


@torch.no_grad()
def test_without_the_step_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be compiled is left to PyTorch."""
    functions = compiler.functions
    monkeypatch.setattr(
        compiler, "functions", lambda *given: None if given[2] else functions(*given)
    )
    with torch.autocast("cpu", torch.bfloat16):
        transformer_xl().model(torch.float32).reader().read(text(1, 1))
