"""The laws of SPEC section 0, for every architecture and option in ``architectures.CASES``.

Lengths, cuts and rows are drawn by hypothesis. ``HYPOTHESIS_PROFILE=thorough`` draws more.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import CASES, VOCABULARY, Case, compressive, randomise, transformer_xl
from golden import assert_same
from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models import MODELS, LanguageModel
from memspan.models.options import EmbeddingConfig

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
gradients = pytest.mark.gradients
cuts_matter_not = pytest.mark.parametrize(
    "case", [pytest.param(c, id=n) for n, c in CASES.items() if c.cut_invariant]
)
cuts_matter = pytest.mark.parametrize(
    "case", [pytest.param(c, id=n) for n, c in CASES.items() if not c.cut_invariant]
)


# ----- Draws and comparisons


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


seeds = st.integers(0, 2**16)
precisions = st.sampled_from(list(TOLERANCE))
row_counts = st.integers(1, 3)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """Tokens ``[B, T]`` and the lengths of the segments that they are cut into."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    return text(draw(row_counts), sum(lengths), draw(seeds)), lengths


def read(
    model: LanguageModel, tokens: Tensor, lengths: list[int], memory: Memory | None = None
) -> tuple[Tensor, Memory]:
    """Logits and final memory after reading in segments."""
    logits = []
    for segment in tokens.split(lengths, 1):
        out = model(segment, memory)
        logits.append(out.logits)
        memory = out.memory
    assert memory is not None
    return torch.cat(logits, 1), memory


def some_memory(model: LanguageModel, rows: int, seed: int = 1) -> Memory:
    """After some text, rows of different ages: one read less, one has forgotten and read on."""
    _, memory = read(model, text(rows, 6, seed), [4, 2])
    memory = memory.reset(torch.arange(rows) % 3 == 1)
    _, memory = read(model, text(rows, 2, seed + 1), [2], memory)
    return memory.reset(torch.arange(rows) % 3 == 2).detach()


def fields(memory: Memory) -> dict[str, Tensor]:
    return {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}


def assert_memories_equal(a: Memory, b: Memory, tolerance: float = 0.0) -> None:
    assert type(a) is type(b)
    for name, tensor in fields(a).items():
        if tensor.is_floating_point():
            assert_same(tensor, fields(b)[name], tolerance, name)
        else:
            assert torch.equal(tensor, fields(b)[name]), name


def rows_of(memory: Memory, *rows: int) -> Memory:
    return memory.select(list(rows))


@pytest.fixture(autouse=True)
def _no_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    """None are recorded unless the test is marked so: it takes half as long again."""
    with torch.set_grad_enabled(request.node.get_closest_marker("gradients") is not None):
        yield


def test_every_architecture_has_cases() -> None:
    assert {type(case.backbone) for case in CASES.values()} == set(MODELS.values())


# ----- 1. Causality


@every_case
@given(dtype=precisions, data=st.data(), drawn=cut_texts(), carried=st.booleans())
def test_causality(
    case: Case,
    dtype: torch.dtype,
    data: st.DataObject,
    drawn: tuple[Tensor, list[int]],
    carried: bool,
) -> None:
    """Logits at t do not change when tokens after t change."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    memory = some_memory(model, len(tokens)) if carried else None
    t = data.draw(st.integers(0, tokens.shape[1] - 1), label="t")
    changed = tokens.clone()
    changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % VOCABULARY
    logits, _ = read(model, tokens, lengths, memory)
    others, _ = read(model, changed, lengths, memory)
    assert_same(others[:, : t + 1], logits[:, : t + 1], TOLERANCE[dtype], "logits before t")


@every_case
def test_tokens_do_matter(case: Case) -> None:
    """The laws would hold for a model that looks at nothing: this one looks at all it should."""
    model = case.shared_model()
    tokens = text(1, 4)
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % VOCABULARY
    logits, memory = read(model, tokens, [4])
    others, other_memory = read(model, changed, [4])
    after = [model(tokens[:, :1], m).logits for m in (memory, other_memory)]
    assert not torch.allclose(logits[:, 2], others[:, 2])
    assert torch.allclose(logits[:, 3], others[:, 3]) == case.sees_itself_only
    assert torch.allclose(*after) == case.forgets_segments


# ----- 2. Cut invariance, or layout


@cuts_matter_not
@given(dtype=precisions, drawn=cut_texts(), carried=st.booleans())
def test_cut_invariance(
    case: Case, dtype: torch.dtype, drawn: tuple[Tensor, list[int]], carried: bool
) -> None:
    """One call, any segments, or token by token: the same logits and the same memory."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    start = some_memory(model, len(tokens)) if carried else None
    whole, memory = read(model, tokens, [tokens.shape[1]], start)
    seen = start.tokens_seen if start else 0
    assert (memory.tokens_seen == seen + tokens.shape[1]).all()
    for cuts in (lengths, [1] * tokens.shape[1]):
        logits, after = read(model, tokens, cuts, start)
        assert_same(logits, whole, TOLERANCE[dtype], "logits")
        assert_memories_equal(after, memory, TOLERANCE[dtype])


@cuts_matter
@given(drawn=cut_texts(), carried=st.booleans())
def test_layout_does_not_depend_on_cuts(
    case: Case, drawn: tuple[Tensor, list[int]], carried: bool
) -> None:
    """How many slots are valid and which tokens they cover; the other cases' whole memory is equal."""
    tokens, lengths = drawn
    model = case.shared_model()
    start = some_memory(model, len(tokens)) if carried else model.initial_memory(len(tokens))
    _, memory = read(model, tokens, [tokens.shape[1]], start)
    assert torch.equal(memory.tokens_seen, start.tokens_seen + tokens.shape[1])
    for cuts in (lengths, [1] * tokens.shape[1]):
        _, after = read(model, tokens, cuts, start)
        for ours, expected in zip(case.layout(after), case.layout(memory), strict=True):
            assert_same(ours, expected, 1e-9, "layout")


@cuts_matter
def test_the_flag_tells_the_truth(case: Case) -> None:
    """Where cuts matter they do, else the case belongs under cut invariance."""
    model = case.shared_model()
    tokens = text(1, 14)
    whole, _ = read(model, tokens, [14])
    logits, _ = read(model, tokens, [1] * 14)
    assert not torch.allclose(logits, whole)


# ----- 3. Row independence


@every_case
@given(dtype=precisions, drawn=cut_texts(), data=st.data())
def test_row_independence(
    case: Case, dtype: torch.dtype, drawn: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """A row alone, in another order, beside other rows, beside a row that is reset: the same."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    n_rows, tol = len(tokens), TOLERANCE[dtype]
    start = some_memory(model, n_rows)
    logits, memory = read(model, tokens, lengths, start)
    order = data.draw(st.permutations(range(n_rows)), label="order")
    permuted, permuted_memory = read(model, tokens[list(order)], lengths, start.select(order))
    assert_same(permuted, logits[list(order)], tol, "reordered logits")
    assert_memories_equal(permuted_memory, memory.select(order), tol)

    row = order[0]
    alone, alone_memory = read(model, tokens[[row]], lengths, rows_of(start, row))
    assert_same(alone, logits[[row]], tol, "logits alone")
    assert_memories_equal(alone_memory, rows_of(memory, row), tol)

    others = torch.arange(n_rows) != row
    tokens = torch.where(others[:, None], (tokens + 1) % VOCABULARY, tokens)
    beside, beside_memory = read(model, tokens, lengths, start.reset(others))
    assert_same(beside[[row]], logits[[row]], tol, "logits beside a reset")
    assert_memories_equal(rows_of(beside_memory, row), rows_of(memory, row), tol)


# ----- 4. Reset = fresh


@every_case
@given(dtype=precisions, drawn=cut_texts(), data=st.data())
def test_reset_is_fresh(
    case: Case, dtype: torch.dtype, drawn: tuple[Tensor, list[int]], data: st.DataObject
) -> None:
    """After a reset a row behaves as with an empty memory; the others as without the reset."""
    tokens, lengths = drawn
    model = case.shared_model(dtype)
    n_rows, tol = len(tokens), TOLERANCE[dtype]
    before = some_memory(model, n_rows)
    mask = data.draw(st.lists(st.booleans(), min_size=n_rows, max_size=n_rows), label="mask")
    forgotten, kept = (
        [i for i in range(n_rows) if mask[i]],
        [i for i, m in enumerate(mask) if not m],
    )
    reset = before.reset(mask)
    assert_memories_equal(rows_of(reset, *kept), rows_of(before, *kept))
    if forgotten:
        empty = model.initial_memory(len(forgotten))
        assert_memories_equal(rows_of(reset, *forgotten), empty)

    logits, memory = read(model, tokens, lengths, reset)
    for memory_before, rows in ((None, forgotten), (rows_of(before, *kept), kept)):
        if rows:
            expected, after = read(model, tokens[rows], lengths, memory_before)
            assert_same(logits[rows], expected, tol, "logits")
            assert_memories_equal(rows_of(memory, *rows), after, tol)


@every_case
def test_no_memory_is_an_empty_memory(case: Case) -> None:
    model = case.shared_model()
    out, expected = model(text(2, 5)), model(text(2, 5), model.initial_memory(2))
    assert torch.equal(out.logits, expected.logits)
    assert_memories_equal(out.memory, expected.memory)


# ----- 5. Bounded memory


@every_case
def test_bounded_memory(case: Case) -> None:
    """Same size before the first token and ever after; no view pins a larger buffer."""
    model, rows = case.shared_model(), 2
    memory = model.initial_memory(rows)
    reader = model.reader(memory)
    size, largest = memory.nbytes, 0
    for n in range(10):
        memory = model(text(rows, 3, n), memory).memory
        reader.read(text(rows, 3, n))
        largest = max(largest, memory.nbytes, reader.memory.nbytes)
    assert memory.nbytes == size == largest
    for kept in (memory, reader.memory):
        for name, tensor in fields(kept).items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    # Every field batch first, none of them a scalar.
    assert {len(t) for t in fields(memory).values()} == {rows}


# ----- 6. Gradients and purity


@every_case
@given(drawn=cut_texts())
def test_purity(case: Case, drawn: tuple[Tensor, list[int]]) -> None:
    """The memory passed in is not changed, so a stream can be branched; calls repeat exactly."""
    tokens, lengths = drawn
    model = case.shared_model()
    memory = some_memory(model, len(tokens))
    copied = memory.map(Tensor.clone)
    logits, after = read(model, tokens, lengths, memory)
    reader = model.reader(memory)
    for segment in tokens.split(lengths, 1):
        reader.read(segment, starts=segment == 0)
    assert_memories_equal(memory, copied)

    # A branch goes elsewhere; the first one is then read again.
    read(model, (tokens + 1) % VOCABULARY, lengths, memory)
    again, after_again = read(model, tokens, lengths, memory)
    assert torch.equal(again, logits)
    assert_memories_equal(after_again, after)


@gradients
@every_case
def test_gradients_reach_every_parameter(case: Case) -> None:
    """Three segments, back-propagated through: nothing is left without a gradient, or with a NaN."""
    model = case.model().train()
    memory, total = None, torch.zeros((), dtype=torch.float64)
    for n in range(3):
        out = model(text(4, 6, n), memory, targets=text(4, 6, n + 9))
        assert out.logits is None
        assert out.losses.shape == (4, 6)
        assert out.auxiliary_loss.shape == ()
        memory = out.memory
        total = total + out.losses.sum() + out.auxiliary_loss
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # Who sees nothing but itself has nothing to weigh.
        assert parameter.grad.any() or case.sees_itself_only, name


@gradients
@every_case
def test_gradients_stop_at_a_detached_memory(case: Case) -> None:
    """Through memory where it is kept, not where it is detached."""
    model = case.shared_model()
    d_model = case.backbone.d_model
    x = torch.randn(2, 2, 4, d_model, dtype=torch.float64, requires_grad=True)
    first = model.backbone(x[0])
    weight = torch.randn(2, 4, d_model, dtype=torch.float64)
    second = model.backbone(x[1], first.memory).hidden
    (through,) = torch.autograd.grad((second * weight).sum(), x)
    assert through[0].any() != case.forgets_segments
    assert through[1].any()
    detached = first.memory.detach()
    assert not any(t.requires_grad for t in fields(detached).values())
    second = model.backbone(x[1], detached).hidden
    (stopped,) = torch.autograd.grad((second * weight).sum(), x)
    assert not stopped[0].any()
    assert stopped[1].any()


@gradients
@every_case
def test_gradients_of_a_whole_model(case: Case) -> None:
    """Numeric against analytic, with respect to the input vectors and the carried memory."""
    backbone = case.shared_model().backbone
    x = torch.randn(2, 3, case.backbone.d_model, dtype=torch.float64, requires_grad=True)
    before = backbone(torch.randn(2, 4, case.backbone.d_model, dtype=torch.float64)).memory
    floats = {n: t for n, t in fields(before.detach()).items() if t.is_floating_point()}

    def run(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        memory = dataclasses.replace(before.detach(), **dict(zip(floats, values, strict=True)))
        out = backbone(x, memory)
        after = {n: t for n, t in fields(out.memory).items() if n not in case.cut_fields}
        return out.hidden, *(t for t in after.values() if t.is_floating_point())

    inputs = (x, *(t.clone().requires_grad_() for t in floats.values()))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@gradients
@every_case
def test_gradients_are_not_kept_without_a_graph(case: Case) -> None:
    model = case.shared_model()
    with torch.no_grad():
        out = model(text(2, 3), targets=text(2, 3))
    assert not out.losses.requires_grad
    assert not any(t.requires_grad for t in fields(out.memory).values())


@every_case
def test_losses_are_those_of_the_logits(case: Case) -> None:
    tokens = text(3, 7)
    model, targets = case.shared_model(), (tokens * 3 + 1) % VOCABULARY
    memory = some_memory(model, len(tokens))
    plain, scored = model(tokens, memory), model(tokens, memory, targets=targets)
    chosen = plain.logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert_same(scored.losses, -chosen, 1e-9, "losses")
    assert_memories_equal(scored.memory, plain.memory)


# ----- Readers


@every_case
@given(dtype=precisions, drawn=cut_texts(), data=st.data(), carried=st.booleans())
def test_reader_equals_model(
    case: Case,
    dtype: torch.dtype,
    drawn: tuple[Tensor, list[int]],
    data: st.DataObject,
    carried: bool,
) -> None:
    """The same logits, losses and memory, however many tokens per call and however old the rows."""
    tokens, lengths = drawn
    model, tol = case.shared_model(dtype), TOLERANCE[dtype]
    memory = some_memory(model, len(tokens)) if carried else model.initial_memory(len(tokens))
    reader = model.reader(memory)
    for segment in tokens.split(lengths, 1):
        scored = data.draw(st.booleans(), label="score")
        targets = (segment + 1) % VOCABULARY if scored else None
        out, ours = model(segment, memory, targets=targets), reader.read(segment, targets=targets)
        assert_same(ours, out.losses if scored else out.logits, tol, "losses or logits")
        memory = out.memory
        assert_memories_equal(reader.memory, memory, tol)
        if data.draw(st.booleans(), label="branch"):
            reader = model.reader(reader.memory)


@gradients
@every_case
def test_reader_records_no_gradients(case: Case) -> None:
    reader = case.shared_model().reader(batch_size=2)
    assert not reader.read(text(2, 3)).requires_grad
    assert not any(t.requires_grad for t in fields(reader.memory).values())


@every_case
def test_reader_over_a_long_stream(case: Case) -> None:
    """Past several moves of its buffers, and with a memory that was taken on the way."""
    model = case.shared_model()
    reader, memory, taken = model.reader(batch_size=2), None, []
    for n, length in enumerate([1, 12, 3, 16, 7] * 4):
        segment = text(2, length, n)
        out = model(segment, memory)
        memory = out.memory
        assert_same(reader.read(segment), out.logits, 1e-9, f"logits of call {n}")
        taken.append((reader.memory, memory))
    for ours, expected in taken:
        assert_memories_equal(ours, expected, 1e-9)


# ----- Streams: rows that end, begin and go on at any time


@every_case
@given(dtype=precisions, data=st.data(), seed=seeds)
def test_streams_in_any_order(
    case: Case, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    """Three rows read, begin anew and change places with what waits: each stream as read alone."""
    model, tol = case.shared_model(dtype), TOLERANCE[dtype]
    streams = [rows_of(some_memory(model, 3, seed), n % 3) for n in range(5)]
    empty = model.initial_memory(1).reset([True])
    rows, waiting, taken = [0, 1, 2], [3, 4], []
    reader = model.reader(joined(streams[:3]))
    acts = st.lists(st.sampled_from(["read", "reset", "replace"]), min_size=3, max_size=7)
    for n, act in enumerate(["read", *data.draw(acts, label="acts"), "read"]):
        if act == "read":
            tokens = text(3, data.draw(st.sampled_from([1, 1, 2, 5]), label="T"), seed + n)
            logits = reader.read(tokens)
            for row, stream in enumerate(rows):
                out = model(tokens[[row]], streams[stream])
                streams[stream] = out.memory
                assert_same(logits[[row]], out.logits, tol, f"logits of row {row}")
        elif act == "reset":
            mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), label="mask")
            reader.reset(mask if n % 2 else torch.tensor(mask))
            for row in [row for row in range(3) if mask[row]]:
                streams[rows[row]] = empty
        else:
            leaving = data.draw(st.permutations(range(3)), label="rows")[: n % 3]
            kept = reader.select(leaving)
            assert_memories_equal(kept, reader.memory.select(leaving))
            for n_left, row in enumerate(leaving):
                streams[rows[row]] = rows_of(kept, n_left)
                rows[row], waiting = waiting[0], [*waiting[1:], rows[row]]
            coming = joined([streams[rows[row]] for row in leaving]) if leaving else kept
            before = coming.map(Tensor.clone)
            reader.replace(leaving if n % 2 else torch.tensor(leaving, dtype=torch.int64), coming)
            assert_memories_equal(coming, before)
        taken.append((reader.memory, joined([streams[stream] for stream in rows])))
    for ours, expected in taken:
        assert_memories_equal(ours, expected, tol)


def joined(memories: list[Memory]) -> Memory:
    """Several memories as the rows of one."""
    each = [fields(memory) for memory in memories]
    return type(memories[0])(**{name: torch.cat([f[name] for f in each]) for name in each[0]})


@every_case
def test_other_rows_are_untouched(case: Case) -> None:
    """To the last digit right after; a memory that the reader was made from, too."""
    model = case.shared_model()
    start = some_memory(model, 3)
    copied, reader = start.map(Tensor.clone), model.reader(start)
    for _ in range(2):
        before, new = reader.memory, some_memory(model, 1, 9)
        reader.reset([False, True, False])
        assert_memories_equal(reader.memory, before.reset([False, True, False]))
        reader.replace([2], new)
        assert_memories_equal(rows_of(reader.memory, 2), new, 1e-12)
        assert_memories_equal(rows_of(reader.memory, 0), rows_of(before, 0))
        reader.read(text(3, 2))
    assert_memories_equal(start, copied)


@every_case
def test_rows_of_one_age_after_rows_of_two(case: Case) -> None:
    """Nothing is left of the masks that an empty row needed beside a full one."""
    model = case.shared_model()
    _, full = read(model, text(2, 9), [9])
    reader = model.reader(full.reset([False, True]))
    reader.read(text(2, 1))
    reader.replace([1, 0], full)
    expected = model(text(2, 1), full.select([1, 0])).logits
    assert_same(reader.read(text(2, 1)), expected, 1e-9, "logits")


@every_case
def test_what_is_not_finite_leaves_with_its_stream(case: Case) -> None:
    model = case.shared_model()
    memory = some_memory(model, 2).map(
        lambda t: t.index_fill(0, torch.tensor(1), torch.nan) if t.is_floating_point() else t
    )
    for length in (1, 3):
        reader = model.reader(memory)
        with contextlib.suppress(MemspanError):
            reader.read(text(2, 2))
        reader.reset([False, True])
        fresh = model.initial_memory(1).reset([True])
        expected = model(text(2, length)[1:], fresh).logits
        assert_same(reader.read(text(2, length))[1:], expected, 1e-9, "logits")


@every_case
def test_reader_refuses_changed_weights(case: Case) -> None:
    def step(model: LanguageModel) -> None:
        with torch.no_grad():
            next(iter(model.backbone.parameters())).add_(1e-3)

    def load(model: LanguageModel) -> None:
        model.load_state_dict(randomise(case.model(), seed=1).state_dict())

    def convert(model: LanguageModel) -> None:
        model.float()

    for change in (step, load, convert):
        model = case.model()
        reader = model.reader(batch_size=2)
        reader.read(text(2, 3))
        change(model)
        with pytest.raises(MemspanError, match="weights have changed"):
            reader.read(text(2, 3))
        model.double()
        model.reader(reader.memory).read(text(2, 3))


@every_case
def test_reader_refuses_training_mode(case: Case) -> None:
    model = case.model()
    with pytest.raises(MemspanError, match="eval"):
        model.train().reader()
    reader = model.eval().reader()
    model.train()
    with pytest.raises(MemspanError, match="eval"):
        reader.read(text(1, 2))


# ----- Models and memories as things to be copied and stored


@every_case
def test_deepcopy_and_state_dict(case: Case, tmp_path: Path) -> None:
    model = case.shared_model()
    memory = some_memory(model, 2)
    loaded = randomise(case.model(), seed=1)
    assert loaded.fingerprint() != model.fingerprint()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), loaded):
        assert other.fingerprint() == model.fingerprint()
        assert sum(p.numel() for p in other.parameters()) == sum(
            p.numel() for p in model.parameters()
        )
        out, expected = other(text(2, 4), memory), model(text(2, 4), memory)
        assert torch.equal(out.logits, expected.logits)
        # A copy is its own: changing it leaves the first model alone, ties included.
        for parameter in other.parameters():
            parameter.data.add_(1.0)
        assert torch.equal(model(text(2, 4), memory).logits, expected.logits)
        assert other.fingerprint() != model.fingerprint()


@every_case
def test_memory_files_belong_to_a_model(case: Case, tmp_path: Path) -> None:
    model, path = case.shared_model(), tmp_path / "memory"
    for memory in (model.initial_memory(2), some_memory(model, 3), model.reader().memory):
        memory.save(path, model.fingerprint())
        loaded = type(memory).load(path, model.fingerprint())
        assert_memories_equal(loaded, memory)
        rows = memory.batch_size
        assert torch.equal(model(text(rows, 4), loaded).logits, model(text(rows, 4), memory).logits)
    other = randomise(case.model(), seed=1)
    with pytest.raises(MemspanError, match="another model"):
        type(memory).load(path, other.fingerprint())


@every_case
def test_a_memory_of_other_rows_is_refused(case: Case) -> None:
    model = case.shared_model()
    with pytest.raises(MemspanError, match="rows"):
        model(text(3, 2), model.initial_memory(2))


@every_case
def test_a_memory_of_another_precision(case: Case) -> None:
    """A memory that was stored in float32 can be read on from in float64."""
    model = case.shared_model()
    memory = some_memory(model, 2)
    rounded = memory.to(dtype=torch.float32)
    out, expected = model(text(2, 3), rounded), model(text(2, 3), memory)
    assert out.logits.dtype == torch.float64
    assert_same(out.logits, expected.logits, 1e-4, "logits")
    assert_same(model.reader(rounded).read(text(2, 3)), out.logits, 1e-6, "reader")


@gradients
@every_case
def test_gradients_under_bfloat16_autocast(case: Case) -> None:
    """Training and reading with bfloat16 products, memory carried: near float32's numbers."""
    model = case.model(torch.float32)
    expected, memory = read(model, text(2, 6), [4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        logits, rough = read(model, text(2, 6), [4, 2])
        out = model(text(2, 6), rough.detach(), targets=text(2, 6, 1))
        (out.losses.float().sum() + out.auxiliary_loss).backward()
        reader = model.reader(batch_size=2)
        read_logits = torch.cat([reader.read(s) for s in text(2, 6).split([4, 2], 1)], 1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert_same(logits, expected, 0.15, "logits")
    assert_same(read_logits, expected, 0.15, "reader's logits")
    for name, tensor in fields(rough).items():
        assert tensor.dtype == fields(memory)[name].dtype
        assert_same(tensor, fields(memory)[name], 0.15, name)
    # And on without it.
    model(text(2, 3), rough)
    model(text(2, 3), reader.memory)


COMPILED = {
    "xl-segment": True,
    "xl-fixed-learned": False,
    "compressive": True,
    "compressive-max-learned": False,
    "fast-delta": True,
    "fast-sum-attention": False,
    "feedback": True,
}
"""Cases that are compiled as one graph, and whether with gradients."""


# Tracing warns of what is not ours.
@pytest.mark.filterwarnings("ignore")
@gradients
# One worker imports the compiler.
@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str) -> None:
    """The same numbers: three segments, and what flows back from the last."""
    # Tracing takes time for each layer, and they are alike.
    case = CASES[name]
    backbone = dataclasses.replace(case.backbone, n_layers=1)
    model, gradient = dataclasses.replace(case, backbone=backbone).model(), COMPILED[name]
    torch._dynamo.reset()

    def run(model: Any) -> tuple[list[Any], list[Tensor]]:
        memory, outputs = model_memory, []
        for n in range(3):
            outputs.append(model(text(2, 4, n), memory))
            memory = outputs[-1].memory
        if not gradient:
            return outputs, []
        loss = outputs[-1].logits.sum() + outputs[-1].auxiliary_loss
        return outputs, list(torch.autograd.grad(loss, parameters))

    # Without gradients from a memory, which is one graph; with them also from none, which is another.
    model_memory = None if gradient else model.initial_memory(2)
    parameters = list(model.parameters())
    with torch.set_grad_enabled(gradient):
        outputs, grads = run(torch.compile(model, fullgraph=True, backend="eager"))
        expected, expected_grads = run(model)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_same(ours.logits, theirs.logits, 1e-9, "logits")
        assert_memories_equal(ours.memory, theirs.memory, 1e-9)
    for grad, theirs in zip(grads, expected_grads, strict=True):
        assert_same(grad, theirs, 1e-9, "gradient")


@gradients
@pytest.mark.parametrize("name", CASES)
def test_a_pass_waits_for_no_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments and back, on tensors without numbers: whoever looks at one fails."""
    # Autocast does not know that device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    # Tensors without numbers take as long for each layer, and layers are alike.
    case = CASES[name]
    case = dataclasses.replace(case, backbone=dataclasses.replace(case.backbone, n_layers=1))
    backbone = case.model().backbone.to("meta").train()
    x = torch.randn(2, 4, backbone.config.d_model, dtype=torch.float64, device="meta")
    out = backbone(x.requires_grad_(), backbone(x).memory)
    (out.hidden.sum() + out.auxiliary_loss).backward()
    assert x.grad is not None


# ----- Transformer-XL's own


@pytest.mark.parametrize("make", [transformer_xl, compressive])
def test_initial_memory_of_zeros_is_attended(make: Callable[..., Case]) -> None:
    """``zeros``: slots that hold nothing but count, unlike an empty memory."""
    for span in ("segment", "fixed"):
        model = make(attention_span=span).model()
        empty, zeros = model.initial_memory(2), model.initial_memory(2, start="zeros")
        for name, slots in zeros.slots().items():
            assert fields(zeros)[name].tolist() == [slots, slots]
        assert zeros.tokens_seen.tolist() == empty.tokens_seen.tolist() == [0, 0]
        assert not zeros.hidden.any()
        out, other = model(text(2, 4), zeros), model(text(2, 4), empty)
        assert not torch.allclose(out.logits, other.logits)
        assert_same(model.reader(zeros).read(text(2, 4)), out.logits, 1e-9, "reader")
        # What is in sight is forgotten the same way.
        assert_memories_equal(zeros.reset([True, True]), empty)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("span", ["segment", "fixed"])
@given(slots=st.integers(1, 12), drawn=cut_texts())
def test_memory_length_may_change_at_evaluation(
    positions: str, span: str, slots: int, drawn: tuple[Tensor, list[int]]
) -> None:
    """As a model that was made with that memory length, the weights being the same."""
    tokens, lengths = drawn
    options = {"positions": positions, "attention_span": span}
    options |= {"max_distance": 20} if positions == "learned" else {}
    model = transformer_xl(**options).model()
    expected = transformer_xl(memory_length=slots, **options).model()
    assert expected.backbone.config.memory_length == slots
    memory = model.initial_memory(len(tokens), memory_length=slots)
    logits, after = read(model, tokens, lengths, memory)
    own, own_memory = read(expected, tokens, lengths)
    assert_same(logits, own, 1e-9, "logits")
    assert_memories_equal(after, own_memory, 1e-9)
    assert after.hidden.shape[2] == slots
    reader = model.reader(memory)
    read_logits = torch.cat([reader.read(s) for s in tokens.split(lengths, 1)], 1)
    assert_same(read_logits, own, 1e-9, "reader")


@given(drawn=cut_texts())
def test_a_span_that_holds_everything_is_plain_attention(drawn: tuple[Tensor, list[int]]) -> None:
    """With memory for the whole text, either span gives what one call without cuts gives."""
    tokens, lengths = drawn
    whole, _ = read(transformer_xl(memory_length=40).model(), tokens, [tokens.shape[1]])
    for span in ("segment", "fixed"):
        model = transformer_xl(memory_length=40, attention_span=span).model()
        logits, memory = read(model, tokens, lengths)
        assert_same(logits, whole, 1e-9, span)
        assert memory.length.tolist() == [tokens.shape[1]] * len(tokens)


def test_fixed_span_sees_exactly_the_last_positions() -> None:
    """One layer: a token M - 1 back matters, one M back does not."""
    model = transformer_xl(n_layers=1, attention_span="fixed").model()
    tokens = text(1, 12)
    for back, matters in ((4, True), (5, False), (0, True)):
        changed = tokens.clone()
        changed[:, 11 - back] = (changed[:, 11 - back] + 1) % VOCABULARY
        same = torch.allclose(model(tokens).logits[:, 11], model(changed).logits[:, 11])
        assert same != matters, back


def test_clamped_distances_share_a_code() -> None:
    """Beyond the clamp order is lost: two far tokens may be swapped, in the first layer's sight."""
    for clamp, same in ((2, True), (None, False)):
        model = transformer_xl(n_layers=1, clamp_length=clamp, memory_length=8).model()
        tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
        swapped = torch.tensor([[2, 1, 3, 4, 5, 6]])
        logits, others = model(tokens).logits[:, -1], model(swapped).logits[:, -1]
        assert torch.allclose(logits, others) == same, clamp


def test_dropout_is_for_training_only() -> None:
    model = transformer_xl(dropout=0.3, attention_dropout=0.3).model()
    assert torch.equal(model(text(2, 5)).logits, model(text(2, 5)).logits)
    model.train()
    assert not torch.allclose(model(text(2, 5)).logits, model(text(2, 5)).logits)
    for option in ("dropout", "attention_dropout"):
        model = transformer_xl(**{option: 0.3}).model().train()
        assert not torch.allclose(model(text(2, 5)).logits, model(text(2, 5)).logits), option


def test_output_dropout_is_the_last_thing_before_the_head() -> None:
    """In training only; memory and the backbone's output do not see it."""
    plain = transformer_xl().model()
    model = transformer_xl(EmbeddingConfig(output_dropout=0.5)).model()
    assert torch.equal(model(text(2, 5)).logits, plain(text(2, 5)).logits)
    for options in ({}, {"targets": text(2, 5, 1)}):
        torch.manual_seed(0)
        out = model.train()(text(2, 5), **options)
        torch.manual_seed(0)
        dropped = F.dropout(plain.backbone(plain.embedding(text(2, 5))).hidden, 0.5)
        expected = plain.head(dropped)
        if options:
            expected = F.cross_entropy(expected.transpose(1, 2), text(2, 5, 1), reduction="none")
        assert_same(out.losses if options else out.logits, expected, 1e-9, "output")
        assert_memories_equal(out.memory, plain(text(2, 5)).memory)


def test_learned_table_is_never_capped_silently() -> None:
    """The longest span fits, one more is an error that says which option to raise."""
    model = transformer_xl(positions="learned", max_distance=9).model()
    model(text(1, 4))
    memory = model.initial_memory(1, memory_length=8)
    model(text(1, 1), memory)
    attempts = {
        "forward": lambda: model(text(1, 5)),
        "reader": lambda: model.reader().read(text(1, 5)),
        "segment": lambda: model(text(1, 2), memory),
        "memory": lambda: model.reader(model.initial_memory(1, memory_length=9)),
    }
    for name, attempt in attempts.items():
        with pytest.raises(MemspanError, match="max-distance") as caught:
            attempt()
        assert "\n" not in str(caught.value), name
    # Clamped distances, or a fixed span, need no more rows however long the segment.
    for options in ({"clamp_length": 8}, {"attention_span": "fixed", "memory_length": 9}):
        model = transformer_xl(positions="learned", max_distance=9, **options).model()
        model(text(1, 30))
        model.reader().read(text(1, 30))


def test_sinusoidal_parameters_do_not_depend_on_the_memory() -> None:
    shapes = [
        {n: p.shape for n, p in transformer_xl(memory_length=m).model().named_parameters()}
        for m in (1, 500)
    ]
    assert shapes[0] == shapes[1]
