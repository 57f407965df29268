"""Feedback: attention against the equation, the fused recurrence against the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from feedback_models import (
    OPTIONS,
    every,
    everything,
    fast,
    gradients,
    memory_of,
    model_of,
    vectors,
)
from golden import assert_same
from memspan.errors import MemspanError
from memspan.models import Feedback, FeedbackMemory
from memspan.models.feedback.config import FeedbackConfig
from memspan.models.segments import padding_mask
from memspan.native import threads
from memspan.ops.feedback import compiled as feedback_loop
from memspan.ops.feedback.attention import Distances, feedback_attention, span_mask


@pytest.mark.parametrize("learned", [False, True], ids=["", "learned spans"])
def test_attention_is_the_equation(learned: bool) -> None:
    """Element by element; rows that see all, a part, and nothing; with weights that fade out."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, r, s, u = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 4), (3, 2, 5, 4), (3, 2, 5, 4), (7, 2, 4), (7, 2), (2, 4))
    )
    fading = torch.tensor([[1, 0.5, 0, 0, 0, 0, 0], [1, 1, 0.75, 0.25, 0, 0, 0]]).double()
    mask = span_mask(torch.tensor([0.0, 1.5]).double(), 2, 7)
    assert torch.equal(mask, fading)
    visible = torch.arange(5) >= torch.tensor([0, 3, 5])[:, None]
    distances = Distances(r, s, mask if learned else None)
    out = feedback_attention(q, k, v, distances, u, visible)
    for b, h in itertools.product(range(3), range(2)):
        expected = torch.zeros(4).double()
        total = 1e-300
        for d in range(1, 6):
            if visible[b, 5 - d]:
                score = (q[b, h] + u[h]) @ k[b, h, -d] + q[b, h] @ r[d - 1, h] + s[d - 1, h]
                weight = math.exp(score.item() / 2) * (fading[h, d - 1].item() if learned else 1)
                expected = expected + weight * v[b, h, -d]
                total = total + weight
        # What learned spans divide by is not quite the sum.
        assert_same(out[b, h], expected / total, 1e-6 if learned else 1e-12, "attention")
    assert not out[2].any()


def test_learned_spans() -> None:
    """Spans that grow are penalised, and ratios come back."""
    model = model_of(memory_length=8, adaptive_span=0.01, span_ramp=2, attention_bias=True)
    with torch.no_grad():
        for layer in model.layers:
            layer.span_ratio.copy_(torch.tensor([0.25, -0.5]))
    out = model(vectors(2, 9))
    # Two layers whose heads look 2 and 0 tokens back before the ramp.
    assert_same(out.auxiliary_loss, torch.tensor(2 * 0.01 * 1.0), 1e-6, "penalty")
    out.hidden.square().sum().backward()
    assert all(layer.span_ratio.grad.all() for layer in model.layers)


def assert_reference(
    model: Feedback,
    x: Tensor,
    memory: FeedbackMemory,
    cuts: list[int],
    implementation: str,
    tolerance: float = 1e-9,
) -> None:
    """Each part by itself, since a large gradient would hide a small one."""
    fast = everything(model, x, memory, cuts, implementation)
    for name, expected in everything(model, x, memory, cuts, "reference").items():
        assert_same(fast[name], expected, tolerance, name)


@fast
@pytest.mark.parametrize(
    ("kind", "cuts"),
    [("empty", [1]), ("full", [20]), ("rows", [33]), ("empty", [1, 2, 42, 5])],
    ids=["empty", "full", "rows", "cut"],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fast_paths_equal_the_reference(
    options: dict[str, Any], kind: str, cuts: list[int], implementation: Any
) -> None:
    """Outputs, final memory and every gradient, the initial memory's too; beyond the span."""
    model = model_of(**options)
    memory = memory_of(model, kind, 3)
    x = vectors(3, sum(cuts))
    assert_reference(model, x, memory, cuts, implementation)


def of_ordinary_size(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[Feedback, Tensor, FeedbackMemory]:
    """A model, and 7 rows, more than fit at once; wide, with remainders."""
    torch.manual_seed(0)
    sizes = {"n_layers": 2, "d_model": 72, "n_heads": 3, "d_ff": 100, "memory_length": 15}
    model = Feedback(FeedbackConfig(**sizes | OPTIONS[name])).to(dtype)
    x = torch.randn(7, 21, 72, dtype=dtype)
    return model, x, model(x[:, :5]).memory.detach().reset(torch.arange(7) == 1)


@fast
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("name", ["default", "dropout", "dropout-post"])
def test_fast_paths_at_an_ordinary_size(
    name: str, dtype: torch.dtype, tolerance: float, implementation: Any
) -> None:
    assert_reference(*of_ordinary_size(name, dtype), [21], implementation, tolerance)


def starting(length: int, *columns: tuple[int, ...]) -> Tensor:
    """Each row's starts: bool ``[B, T]``."""
    starts = torch.zeros(len(columns), length, dtype=torch.bool)
    for row, own in zip(starts, columns, strict=True):
        row[[*own]] = True
    return starts


@fast
@pytest.mark.parametrize("name", ["bias", "per-layer-gelu", "shortest", "dropout-post"])
def test_fast_paths_equal_the_reference_with_documents(name: str, implementation: Any) -> None:
    """With dropout, too, which draws the same in all. The next test finds the reference right."""
    model = model_of(**OPTIONS[name])
    starts = starting(26, (), (0, 7, 8), (3, 16, 25))
    where = {"starts": starts, "lengths": torch.tensor([20, 26, 0]), "padding": "left"}
    own = padding_mask(where["lengths"], 26, "left")[..., None]
    given = (model, vectors(3, 26), memory_of(model, "rows", 3), [26])
    found = everything(*given, implementation, own, **where)
    for part, expected in everything(*given, "reference", own, **where).items():
        assert_same(found[part], expected, 1e-9, part)


@every
@pytest.mark.parametrize("span", [5, 40])
def test_documents_are_read_as_if_alone(implementation: str, span: int) -> None:
    """Outputs, memory and all gradients, over several blocks of steps."""
    starts = starting(32, (), (0, 20), (3, 4, 15, 16, 31))
    model = model_of(memory_length=span, attention_bias=True)
    memory = memory_of(model, "rows", 3)

    def read(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        start = FeedbackMemory(memory.tokens_seen, before, memory.length)
        out = model(x, start, starts=starts, implementation=implementation)
        return out.hidden, out.memory.vectors

    def read_alone(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        start = FeedbackMemory(memory.tokens_seen, before, memory.length)
        hidden = []
        after = []
        for row, begins in enumerate(starts):
            now = start.select([row])
            parts = []
            edges = sorted({0, *begins.nonzero().flatten().tolist(), x.shape[1]})
            for low, high in itertools.pairwise(edges):
                now = now.reset([bool(begins[low])])
                out = model(x[[row], low:high], now, implementation=implementation)
                parts.append(out.hidden)
                now = out.memory
            hidden.append(torch.cat(parts, 1))
            after.append(now.vectors)
        return torch.cat(hidden), torch.cat(after)

    given = {"x": vectors(3, 32).requires_grad_(), "memory": memory.vectors.requires_grad_()}
    leaves = given | dict(model.named_parameters())
    found, wanted = (
        [*out, *torch.autograd.grad(sum(t.square().sum() for t in out), [*leaves.values()])]
        for out in (run(*given.values()) for run in (read, read_alone))
    )
    for part, ours, theirs in zip(["hidden", "after", *leaves], found, wanted, strict=True):
        assert_same(ours, theirs, 1e-10, part)


@every
@torch.no_grad()
def test_a_start_at_the_first_token_empties_a_spoilt_memory(implementation: str) -> None:
    model = model_of()
    memory = memory_of(model, "full", 2)
    memory = memory.map(lambda t: t * torch.nan if t.is_floating_point() else t)
    starts = starting(9, (0,), ())
    out = model(vectors(2, 9), memory, starts=starts, implementation=implementation)
    for found in (out.hidden, out.memory.vectors):
        assert found[0].isfinite().all()
        assert found[1].isnan().any()


@pytest.mark.skipif(not feedback_loop.available(torch.zeros(())), reason="no loops in C")
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread, and with 7 rows and 6 pairs of a layer and a head in 2 and in 4."""
    monkeypatch.setattr(threads, "LEAST_WORK", 1)
    results = []
    for n in (1, 2, 4):
        # Only of the loops: PyTorch's own products may add in another order.
        monkeypatch.setattr(threads.torch, "get_num_threads", lambda n=n: n)
        results.append(everything(*of_ordinary_size("dropout"), [21], "compiled"))
    for result in results[1:]:
        assert all(map(torch.equal, result.values(), results[0].values()))


@fast
@pytest.mark.parametrize("options", [{}, OPTIONS["dropout-post"]], ids=["pre", "dropout-post"])
def test_gradients_are_numeric_ones(options: dict[str, Any], implementation: Any) -> None:
    """Gradients that reach parameters are compared with the reference's."""
    model = model_of(memory_length=3, attention_bias=True, **options)
    memory = memory_of(model, "rows", 3)

    def run(x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        start = FeedbackMemory(memory.tokens_seen, start, memory.length)
        out = model(x, start, implementation=implementation)
        return out.hidden, out.memory.vectors

    inputs = (vectors(3, 4).requires_grad_(), memory.vectors.requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


# ----- What breaks where state is shared between calls


def test_forwards_before_a_backward() -> None:
    """Two graphs, an evaluation and a reader in between, backward in the other order, and twice."""
    model = model_of()
    a = vectors(2, 9)
    b = vectors(2, 12, 1)
    expected = [gradients(model, model(x).hidden.square().sum()) for x in (a, b)]
    losses = [model(x).hidden.square().sum() for x in (a, b)]
    with torch.no_grad():
        model.eval()(vectors(5, 20, 2))
        model.reader(None, 2).read(vectors(2, 7, 3))
        model.train()
    for _ in range(2):
        for loss, wanted in zip(reversed(losses), reversed(expected), strict=True):
            for ours, theirs in zip(gradients(model, loss), wanted, strict=True):
                assert torch.equal(ours, theirs)


def test_writing_over_the_output_changes_no_gradient() -> None:
    model = model_of(final_norm=False)
    x = vectors(2, 5).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).hidden.sum(), x)
    out = model(x)
    loss = out.hidden.sum()
    with torch.no_grad():
        out.hidden.zero_()
        out.memory.vectors.zero_()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


# ----- Which implementation, and what is refused


@pytest.mark.skipif(not feedback_loop.available(torch.zeros(())), reason="no loops in C")
@pytest.mark.parametrize("failing", ["prepare", "forward", "backward", "position_gradients"])
def test_the_compiled_loop_says_that_memory_is_full(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = feedback_loop.library.functions(feedback_loop.SOURCE, torch.float32, False)
    names = ("prepare", "forward", "backward", "position_gradients", "release")
    functions = {name: staticmethod(getattr(code, name)) for name in names}
    functions[failing] = staticmethod(lambda *_: 0)
    full = type("Full", (), functions)
    model = Feedback(FeedbackConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, memory_length=4))
    monkeypatch.setattr(feedback_loop.library, "functions", lambda *_: full)
    with pytest.raises(MemspanError, match="memory is full: use a smaller batch"):
        model(torch.randn(1, 3, 8), implementation="compiled").hidden.sum().backward()
