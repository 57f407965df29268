"""torch's recurrent modules, functions with a state, and models with caches of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memspan.stateful.caches import Causal
from memspan.stateful.protocol import (
    Inputs,
    NotOfferedError,
    ReadsPadded,
    RefusedError,
    Stateful,
    Truncates,
)
from memspan.stateful.recurrent import Function, Recurrent, copied, mapped

RNNS = {
    "rnn": nn.RNN(4, 6, 2),
    "gru, batch first": nn.GRU(4, 6, batch_first=True),
    "lstm, projected": nn.LSTM(4, 6, 2, proj_size=3),
    "lstm, batch first": nn.LSTM(4, 6, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("module", RNNS.values(), ids=RNNS.keys())
def test_recurrent_modules_read_as_torch_does(module: nn.RNNBase) -> None:
    model, x = Recurrent(module), torch.randn(3, 5, 4)
    assert isinstance(model, Stateful)
    assert isinstance(model, ReadsPadded)
    outputs, state = model.read(x, model.start(3))
    own = module(x)[0] if module.batch_first else module(x.transpose(0, 1))[0].transpose(0, 1)
    torch.testing.assert_close(outputs, own)
    rows = torch.tensor([2, 2, 0, 1])
    expected, _ = model.read(x, state)
    picked, _ = model.read(x[rows], model.select(state, rows))
    torch.testing.assert_close(picked, expected[rows])
    # The state after padding is that before it.
    lengths = torch.tensor([5, 1, 3])
    read, after = model.read_padded(x, model.start(3), lengths, "right")
    torch.testing.assert_close(read[2, :3], outputs[2, :3])
    alone, _ = model.read(x[2:, 3:], model.select(after, torch.tensor([2])))
    torch.testing.assert_close(alone, outputs[2:, 3:])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("module", RNNS.values(), ids=RNNS.keys())
def test_scripts_read_recurrent_modules_alike(module: nn.RNNBase) -> None:
    model, x = Recurrent(module, "module = given"), torch.randn(3, 5, 4)
    made: dict[str, Any] = {"torch": torch, "given": module}
    exec(model.source(), made)
    rows, lengths = torch.tensor([2, 0]), torch.tensor([4, 1])
    outputs = []
    for each in (SimpleNamespace(**made), model):
        _, state = each.read(x, each.start(3))
        state = each.select(each.copy(state), rows)
        y, _ = each.read_padded(x[:2], state, lengths, "right")
        outputs.append(torch.cat([y, each.read(x[:2], state)[0]]))
    assert torch.equal(*outputs)


def test_recurrent_modules_refuse_what_they_cannot() -> None:
    with pytest.raises(RefusedError, match="bidirectional=False"):
        Recurrent(nn.GRU(4, 6, bidirectional=True))
    model = Recurrent(nn.GRU(4, 6))
    with pytest.raises(NotOfferedError):
        model.read_padded(torch.zeros(1, 2, 4), model.start(1), torch.tensor([1]), "left")
    with pytest.raises(RefusedError):
        model.read_padded(torch.zeros(1, 2, 4), model.start(1), torch.tensor([0]), "right")


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

    def __init__(self, shape: str = "dict", name: str = "past_key_values") -> None:
        super().__init__()
        self.embedding, self.shape, self.name = nn.Embedding(7, 7), shape, name

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Any = None
    ) -> Any:
        assert attention_mask is None or len(attention_mask.shape) == 2
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[:, -x.shape[1] :, None]
        y = x.cumsum(1) + (0 if past_key_values is None else past_key_values[0][:, None])
        cache = (y[:, -1],)
        if self.shape == "tuple":
            return None, y, cache
        if self.shape == "logits":
            return y
        if self.shape == "states":
            return {"last_hidden_state": y, self.name: cache}
        return {"logits": y, self.name: cache}


@pytest.mark.parametrize(
    "module",
    [Summing(), Summing("tuple"), Summing(name="mems")],
    ids=["dictionary", "tuple", "another name"],
)
def test_logits_and_caches_are_found(module: Summing) -> None:
    model = Causal(module)
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
        def forward(
            self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Any = None
        ) -> Any:
            if past_key_values is not None and input_ids.shape[1] > 1:
                raise ValueError("one at a time")
            return super().forward(input_ids, past_key_values, attention_mask)

    model = Causal(OneByOne())
    _, state = model.read(torch.tensor([[1, 2]]), model.start(1))
    model.read(torch.tensor([[3]]), model.copy(state))
    with pytest.raises(RefusedError, match="one at a time"):
        model.read(torch.tensor([[3, 4]]), state)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Summing("states"), "not return logits"),
        (Summing("logits"), "no cache"),
        (nn.Linear(2, 2), "no config.vocab_size"),
    ],
)
def test_what_cannot_be_read_is_refused(module: nn.Module, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        Causal(module)


def test_what_a_model_raises_is_its_refusal() -> None:
    model = Causal(Summing())
    with pytest.raises(RefusedError, match="IndexError"):
        model.read(torch.tensor([[7]]), model.start(1))
