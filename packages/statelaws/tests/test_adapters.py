"""torch's recurrent modules, functions with a state, and models with caches of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statelaws import (
    Causal,
    Function,
    Inputs,
    NotOfferedError,
    Recurrent,
    RefusedError,
    Stateful,
    Truncates,
    by_steps,
    check,
)
from statelaws.laws import NAMES
from statelaws.states import copied, mapped

RNNS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "rnn": (nn.RNN, {"num_layers": 2}),
    "gru, batch first": (nn.GRU, {"batch_first": True}),
    "lstm, projected": (nn.LSTM, {"num_layers": 2, "proj_size": 3}),
    "lstm, batch first": (nn.LSTM, {"batch_first": True}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "options"), RNNS.values(), ids=RNNS)
def test_recurrent_modules_read_as_torch_does_and_break_no_law(
    kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    module = kind(4, 6, **options)
    x = torch.randn(3, 5, 4)
    model = Recurrent(module, "module = given")
    outputs, state = model.read(x, model.start(3))
    own = module(x)[0] if module.batch_first else module(x.transpose(0, 1))[0].transpose(0, 1)
    torch.testing.assert_close(outputs, own)
    # Scripts read alike.
    made: dict[str, Any] = {"torch": torch, "given": module}
    made_from = ("start", "read", "read_padded", "select", "copy")
    exec(model.source(made_from), made)
    script = SimpleNamespace(**made)
    rows = torch.tensor([2, 2, 0])
    lengths = torch.tensor([5, 1, 3])
    _, theirs = script.read(x, script.start(3))
    _, theirs = script.read_padded(x, script.copy(theirs), lengths, "right")
    _, ours = model.read_padded(x, model.copy(state), lengths, "right")
    found, expected = (
        m.read(x, m.select(s, rows))[0] for m, s in ((script, theirs), (model, ours))
    )
    assert torch.equal(found, expected)
    outcomes = {finding.law: finding.outcome for finding in check(model, seed=3).findings}
    missing = {"fresh-start", "padding-left", "roll-back", "files", "replay"}
    assert outcomes == {name: "not-offered" if name in missing else "holds" for name in NAMES}


def test_recurrent_modules_refuse_two_directions_and_left_padding() -> None:
    with pytest.raises(RefusedError, match="bidirectional=False"):
        Recurrent(nn.GRU(4, 6, bidirectional=True))
    model = Recurrent(nn.GRU(4, 6))
    with pytest.raises(NotOfferedError):
        model.read_padded(torch.zeros(1, 2, 4), model.start(1), torch.tensor([1]), "left")


def test_a_function_with_a_state() -> None:
    def summed(x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        y = state["sum"][:, None] + x.cumsum(1)
        return y, {"sum": y[:, -1], "count": state["count"] + x.shape[1]}

    def first(rows: int) -> dict[str, Any]:
        return {"sum": torch.zeros(rows, 4), "count": torch.tensor(0)}

    model = Function(summed, first, Inputs(width=4))
    assert isinstance(model, Stateful)
    x = torch.randn(2, 3, 4)
    _, state = model.read(x, model.start(2))
    picked = model.select(state, torch.tensor([1, 1, 0]))
    torch.testing.assert_close(picked["sum"], state["sum"][[1, 1, 0]])
    assert picked["count"] == 3


def test_copies_are_apart_and_carry_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    state = SimpleNamespace(parts=[weight * 2, {"n": 3}])
    copy = copied(state)
    state.parts[0].detach().zero_()
    state.parts[1]["n"] = 4
    assert copy.parts[0].tolist() == [2, 2]
    assert copy.parts[1] == {"n": 3}
    assert not copy.parts[0].requires_grad
    assert mapped(lambda t: t + 1, (weight * 2,))[0].requires_grad


class Summing(nn.Module):
    """Logits of a sum over all tokens, which is also its cache."""

    config = SimpleNamespace(vocab_size=7, sliding_window=3)

    def __init__(self, logits: str = "logits", cache: str = "past_key_values") -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 7)
        self.names = (logits, cache)

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Any = None
    ) -> Any:
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[:, -x.shape[1] :, None]
        y = x.cumsum(1) + (0 if past_key_values is None else past_key_values[0][:, None])
        return dict(zip(self.names, (y, (y[:, -1],)), strict=True))


@pytest.mark.parametrize("cache", ["past_key_values", "mems"])
def test_logits_and_caches_are_found(cache: str) -> None:
    model = Causal(Summing(cache=cache))
    assert isinstance(model, Truncates)
    assert model.claims.lengths == {"sliding_window": 3}
    assert model.claims.bounded
    tokens = torch.randint(7, (2, 6))
    whole, _ = model.read(tokens, model.start(2))
    _, state = model.read(tokens[:, :2], model.start(2))
    rest, _ = model.read(tokens[:, 2:], model.select(model.copy(state), torch.tensor([0, 1])))
    torch.testing.assert_close(rest, whole[:, 2:])
    with pytest.raises(NotOfferedError, match="tuple has no crop"):
        model.truncate(state, 1)
    padded, _ = model.read_padded(tokens[:, 2:], state, torch.tensor([4, 2]), "left")
    alone, _ = model.read(tokens[1:, 4:], model.select(state, torch.tensor([1])))
    torch.testing.assert_close(padded[1:, 2:], alone)


def test_models_that_read_on_by_single_tokens_are_read() -> None:
    class OneByOne(Summing):
        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
            if past_key_values is not None and input_ids.shape[1] > 1:
                raise ValueError("one at a time")
            return super().forward(input_ids, past_key_values)

    model = Causal(OneByOne())
    _, state = model.read(torch.tensor([[1, 2]]), model.start(1))
    model.read(torch.tensor([[3]]), model.copy(state))


class Renamed(Summing):
    """Names as in transformers since 5.24: outputs answer to the old one, but do not list it."""

    def forward(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, cache)


class Unnamed(Summing):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids, kwargs.get("past"))


class Forgetting(Summing):
    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        return super().forward(input_ids)


@pytest.mark.parametrize("returned", ["cache", "past_key_values", "cache_params"])
def test_caches_are_passed_by_a_name_that_the_model_has(returned: str) -> None:
    model = Causal(Renamed(cache=returned))
    source = model.source(["read"])
    assert "takes = 'cache'" in source
    assert f"returns = {returned!r}" in source
    report = check(model, ["cuts"])
    assert report["cuts"].outcome == "holds", report


class OutOfOrder(Summing):
    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        raise OSError("no driver")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Summing("last_hidden_state"), "not return logits"),
        (Summing(cache="other"), "no cache"),
        (nn.Linear(2, 2), "no config.vocab_size"),
        (OutOfOrder(), "OSError: no driver"),
        (
            Unnamed(),
            r"Unnamed.forward takes no cache by a name known here \(cache, past_key_values,",
        ),
        (Forgetting(), "the cache given to Forgetting as past_key_values had no effect"),
    ],
)
def test_unreadable_models_are_refused(module: nn.Module, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        Causal(module)


class CopiesItself:
    """A container whose copies are made from its own tensors, as TensorDict's are."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(self.h.clone())


def test_a_state_that_copies_itself_is_refused_where_rows_are_selected() -> None:
    cell = nn.GRUCell(4, 8)

    def read(x: Tensor, state: CopiesItself) -> tuple[Tensor, CopiesItself]:
        h = state.h
        outputs = []
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, 1), CopiesItself(h)

    model = Function(read, lambda rows: CopiesItself(torch.zeros(rows, 8)), Inputs(width=4), cell)
    (finding,) = check(model, ["rows"]).findings
    assert finding.outcome == "refused"
    assert "copies them in its own way: write an object with a select" in finding.detail


def test_functions_of_one_step_read_many() -> None:
    cell = nn.GRUCell(4, 8)

    def step(x: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        state = cell(x["seen"], state)
        return state, state

    parts = Inputs(parts={"seen": Inputs(width=4)})
    model = Function(by_steps(step), lambda rows: torch.zeros(rows, 8), parts, cell)
    x = torch.randn(2, 3, 4)
    y, state = model.read({"seen": x}, model.start(2))
    layer = nn.GRU(4, 8, batch_first=True)
    layer.load_state_dict({f"{name}_l0": weight for name, weight in cell.state_dict().items()})
    torch.testing.assert_close(y, layer(x)[0])
    assert torch.equal(state, y[:, -1])
    assert not check(model, ["cuts", "rows"]).broken


def test_rows_of_a_state_may_be_in_other_dimensions_of_other_tensors() -> None:
    def read(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        sums, layers = state
        y = sums[:, None] + layers[0][:, None] + x.cumsum(1)
        return y, (y[:, -1] - layers[0], layers + x.sum((1, 2))[None, :, None])

    def first(rows: int) -> Any:
        return torch.zeros(rows, 4), torch.zeros(2, rows, 1)

    def dimension(part: Tensor) -> int:
        return part.dim() - 2

    model = Function(read, first, Inputs(width=4), batch_dimension=dimension)
    _, state = model.read(torch.randn(3, 2, 4), model.start(3))
    rows = torch.tensor([2, 0])
    sums, layers = model.select(state, rows)
    assert torch.equal(sums, state[0][rows])
    assert torch.equal(layers, state[1][:, rows])
    turned = Function(read, lambda n: (torch.zeros(4, n), first(n)[1]), Inputs(width=4))
    turned.batch_dimension = dimension
    state = turned.start(3)
    with pytest.raises(RefusedError, match="whose dimension 0 is not that of rows"):
        turned.select(state, rows)
