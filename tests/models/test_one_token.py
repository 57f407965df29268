"""One token in one call to C, and by PyTorch's reader: both equal the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import architectures
from architectures import compressive, fast_weights, gated_delta_net, transformer_xl
from golden import assert_same
from memspan.native import library, threads
from memspan.ops.relative_step import compiled as relative_step
from readings import assert_memories_equal, some_memory, text

USUAL = ("xl-segment-no-memory", "xl-fixed", "xl-fixed-one", "compressive", "compressive-dilated")
USUAL += ("compressive-most-used", "compressive-none", "fast-delta", "gated")
CASES = {name: architectures.CASES[name] for name in USUAL} | {
    "xl": transformer_xl(n_heads=3, d_head=32, clamp_length=3, final_norm=False),
    "xl-learned-gelu": transformer_xl(
        positions="learned", max_distance=60, activation="gelu", attention_bias=True
    ),
    "xl-wide-heads": transformer_xl(d_head=64, d_model=24, d_ff=23, n_layers=1),
    "xl-gated": transformer_xl(gating="gru", d_ff=4, attention_bias=True),
    "compressive-mean-gated": compressive(compression="mean", gating="gru", activation="gelu"),
    "compressive-max-learned": compressive(
        compression="max", positions="learned", max_distance=60, attention_bias=True
    ),
    "compressive-most-used-fixed": compressive(
        compression="most-used", auxiliary_loss="none", attention_span="fixed"
    ),
    "fast-sum": fast_weights(rule="sum", activation="gelu", nu=3, n_layers=3),
    "fast-wide": fast_weights(normalisation="none", final_norm=False, d_head=9, n_heads=3),
    "fast-positions": fast_weights(positions="sinusoidal", d_model=40, n_heads=1, d_ff=23),
    "fast-norm": fast_weights(norm="feed-forward"),
    "gated-shared": gated_delta_net(
        n_value_heads=6, d_head=3, d_value=5, negative_eigenvalues=True, convolution=3
    ),
    "gated-wide": gated_delta_net(d_head=32, d_value=70, convolution=1, activation="gelu"),
    "gated-longer": gated_delta_net(n_heads=1, d_value=64, convolution=6, d_model=40, d_ff=23),
}
# A buffer has room for 64 tokens more than there are slots: it moves among the last ones.
PARTS = [1, 1, 1, 7, 1, 45, *[1] * 12, 2, 1]


@pytest.fixture(autouse=True)
def _the_loops() -> None:
    if not relative_step.available(torch.zeros(())):
        pytest.skip("no loops in C")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    # Without normalisation the rule diverges where keys are as long as here.
    + [(name, torch.float32) for name in CASES if name != "fast-wide"],
)
def test_as_the_model_and_as_pytorch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different ages in threads, single tokens between segments, past the ends of memory and
    buffer; the memory that a reader is made from stays."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    backbone = CASES[name].model(dtype).backbone
    outer = backbone.layers[0].feed_forward.outer.weight
    outer.data = outer.data.t().contiguous().t()
    memory = some_memory(CASES[name].model(dtype), 13)
    before = memory.map(Tensor.clone)
    x = torch.randn(13, sum(PARTS), backbone.config.d_model)
    reader = backbone.reader(memory, 13)
    pytorch = backbone.reader(memory, 13)
    pytorch._step = None
    assert reader._step is not None
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    after = memory
    for n, part in enumerate(x.to(dtype).split(PARTS, 1)):
        out = backbone(part, after)
        after = out.memory
        for each in (reader, pytorch):
            assert_same(each.read(part), out.hidden, tolerance, "hidden")
            if n % 4 == 0:
                assert_memories_equal(each.memory, after, tolerance)
    assert_memories_equal(memory, before)


@torch.no_grad()
def test_without_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-norm, adapters, float16, documents, and what is not compiled are left to PyTorch."""

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
    functions = library.functions
    with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(library, "functions", lambda *of: None if of[2] else functions(*of))
        model.reader().read(text(1, 1))
    monkeypatch.setattr(library, "functions", lambda *_: None)
    model.reader().read(text(1, 1))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES if "fast" not in name])
def test_autocast_rounds_the_weights_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that has such weights reads the same in float32; autocast may end and begin."""
    model = CASES[name].model(torch.float32).backbone
    rounded = copy.deepcopy(model)
    for part_name, part in rounded.named_modules():
        # The codes of positions are projected once, in float32.
        if type(part) is nn.Linear and not part_name.endswith(".position"):
            part.weight.copy_(part.weight.bfloat16())
    reader = model.reader(None, 5)
    other = rounded.reader(None, 5)
    for n, token in enumerate(torch.randn(5, 90, model.config.d_model).split(1, 1)):
        always = n < 60
        expected = other.read(token)
        by_autocast = always or n % 3 > 0
        with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16, by_autocast):
            if always:
                patch.setattr(type(reader), "_step", None)
            assert_same(reader.read(token), expected, 2e-5 if always else 0.1, "hidden")
        if n == 59:
            assert_memories_equal(reader.memory, other.memory, 2e-5)


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
    for n_rows in range(2, 10):
        assert torch.equal(read(tokens[:n_rows]), expected[:n_rows]), n_rows
