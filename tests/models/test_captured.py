"""Single tokens as CUDA graphs, by a stand-in that replays on the CPU; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import CASES, ONE_OF_EACH, Case
from captures import Capturable, graphs_on_cpu
from golden import assert_same
from memspan.errors import MemspanError, StaleReaderError
from memspan.models.captured import CapturedReader

ROWS = 3


@pytest.fixture
def on_a_device() -> Iterator[None]:
    with graphs_on_cpu():
        yield


def reads(case: Case, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """All that a reader returns for tokens one by one, between them a reset, a segment and memories
    that are put in rows."""
    backbone = case.shared_model().backbone
    x = torch.randn(ROWS, 12, case.backbone.d_model, dtype=torch.float64)
    before = backbone(x[:, :4]).memory
    reader = backbone.reader(before, ROWS, **options)
    for t in range(4, 11):
        if t == 6:
            reader.reset(torch.arange(ROWS) == 1)
        if t == 7:
            yield "segment", reader.read(x[:, 7:10])
        if t == 9:
            kept = reader.select([2, 0])
            reader.replace([0, 1], kept)
        yield f"token {t}", reader.step(x[:, t])
    yield from reader.memory.tensors().items()


@pytest.mark.parametrize("name", CASES)
def test_captured_tokens_equal_a_readers(name: str) -> None:
    """Nothing that Python computed for the first token is in the graph, for all options."""
    expected = list(reads(CASES[name]))
    torch.manual_seed(0)
    with graphs_on_cpu():
        found = list(reads(CASES[name], cuda_graph=True))
    for (what, a), (_, b) in zip(found, expected, strict=True):
        assert_same(a, b, 1e-9, what)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_captures_wait_for_nothing_and_keep_nothing(name: str) -> None:
    """A pass of one token is what is captured. A tensor that it kept, such as a table made at first
    use, would change with each replay."""
    backbone = CASES[name].shared_model().backbone
    memory = backbone.initial_memory(ROWS)
    x = torch.randn(ROWS, 1, CASES[name].backbone.d_model, dtype=torch.float64)
    with graphs_on_cpu(), torch.no_grad(), Capturable() as watch:
        output = nn.Module.__call__(backbone, x, memory)
        watch.only(output.hidden, output.memory.tensors(), output.auxiliary_loss, output.statistics)


def watched(function: Callable[[], object]) -> None:
    """Run a function of which nothing may be kept."""
    with Capturable() as watch:
        function()
        watch.only()


def test_watch_finds_what_must_not_be_captured() -> None:
    x = torch.arange(4.0)
    cache: list[Tensor] = []
    for function, message in (
        (lambda: x[x > 1], "index by a mask waits"),
        (lambda: x.sum().item(), "item copies to or from the host"),
        (lambda: bool(x.any()), "__bool__ copies"),
        (lambda: x.nonzero(), "nonzero waits"),
        (lambda: x.new_tensor([1.0]), "new_tensor copies"),
        (lambda: x[[0, 2]], "a list is copied to the device"),
        (lambda: x.cpu(), "cpu copies"),
        (lambda: cache.append(x + 1), "kept beyond the capture"),
    ):
        with pytest.raises(AssertionError, match=message):
            watched(function)


@pytest.mark.usefixtures("on_a_device")
def test_stand_in_repeats_numbers_of_the_host() -> None:
    """A number that Python had read stays as it was when the graph was captured: tests see it."""
    from memspan.cuda_graphs import Captured

    count = [1.0]
    x = torch.ones(2)
    graph = Captured(lambda: x * count[0], x.device)
    count[0] = 5.0
    x.fill_(3.0)
    assert graph.replay().tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("on_a_device")
class TestCapturedReader:
    CASE = CASES["xl-segment"]

    def test_memory_is_a_value(self) -> None:
        reader = self.CASE.shared_model().backbone.reader(None, 1, cuda_graph=True)
        x = torch.randn(1, 8, dtype=torch.float64)
        first = reader.step(x)
        memory = reader.memory
        kept = memory.hidden.clone(), first.clone()
        reader.step(x)
        assert torch.equal(memory.hidden, kept[0])
        assert torch.equal(first, kept[1])

    def test_autocast_is_captured_anew(self) -> None:
        model = self.CASE.model(torch.float32)
        x = torch.randn(1, 4, 8)
        readers = [model.backbone.reader(None, 1, cuda_graph=graph) for graph in (True, False)]
        for t, on in enumerate((False, True, True, False)):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                a, b = (reader.step(x[:, t]) for reader in readers)
            assert_same(a, b, 2e-2 if on else 1e-2, "output")

    def test_changed_weights_are_refused(self) -> None:
        backbone = self.CASE.model().backbone
        reader = backbone.reader(None, 1, cuda_graph=True)
        x = torch.randn(1, 8, dtype=torch.float64)
        reader.step(x)
        with torch.no_grad():
            next(backbone.parameters()).add_(1)
        with pytest.raises(StaleReaderError):
            reader.step(x)

    def test_hooks_are_refused(self) -> None:
        backbone = self.CASE.model().backbone
        backbone.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(MemspanError, match="a CUDA graph would skip hooks: remove them, or"):
            backbone.reader(None, 1, cuda_graph=True)

    def test_language_models_read_by_it(self) -> None:
        model = self.CASE.shared_model()
        tokens = torch.randint(11, (2, 6))
        readers = [model.reader(batch_size=2, cuda_graph=graph) for graph in (True, False)]
        assert isinstance(readers[0]._backbone, CapturedReader)
        for token in tokens.split(1, 1):
            a, b = (reader.read(token) for reader in readers)
            assert_same(a, b, 1e-9, "logits")


def test_cpu_is_refused() -> None:
    model = CASES["lstm"].shared_model()
    with pytest.raises(
        MemspanError, match="a CUDA graph needs CUDA, and the model is on cpu: move"
    ):
        model.reader(cuda_graph=True)
