"""Gated-delta layers of transformers: their weights in ours, our operations in theirs."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import json
import pickle
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import pages
from golden import assert_same
from memspan.errors import MemspanError
from memspan.integrations.transformers import (
    accelerate,
    from_gated_delta_rule,
    to_gated_delta_rule,
)
from memspan.integrations.transformers.accelerate import _OURS, _accelerated
from memspan.integrations.transformers.gated_delta import to_our_names
from memspan.integrations.transformers.model import CACHE
from memspan.ops.fast_weights.rules import delta_rule
from memspan.stateful.recipes import RECIPES, build

TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
every_type = pytest.mark.parametrize("model_type", TYPES)
every_implementation = pytest.mark.parametrize(
    "implementation", ["compiled", "chunked", "reference"]
)
Tensors = dict[str, Tensor]
# transformers says in every process once that its own functions are slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "accelerate.md"


def made(model_type: str = "qwen3_5_text", seed: int = 0) -> Any:
    """A small model whose heads have narrower values than keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES[model_type], "linear_value_head_dim", 6)
        module: Any = build(model_type, seed).module
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            # Beside stronger decays their differences of sums over a chunk are less exact than 2e-5.
            parameter.data.uniform_(-3, 0)
    return module


def mixer(model: Any) -> Any:
    return model.model.layers[0].linear_attn


def tokens(model: Any, length: int = 150) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (2, length), generator=generator)


# ----- Their weights in our layer


@every_type
@every_implementation
def test_ours_is_the_layer_of_transformers(implementation: str, model_type: str) -> None:
    """Outputs and all gradients in float32, over three of their chunks; OLMo's beta goes to 2."""
    theirs = mixer(made(model_type))
    ours = to_gated_delta_rule(theirs)
    assert ours.config.negative_eigenvalues == (model_type == "olmo_hybrid")
    x, up = torch.randn(2, 2, 150, theirs.hidden_size)
    sides = []
    for part in (theirs, ours):
        own = x.clone().requires_grad_()
        y = part(own) if part is theirs else ours(own, None, implementation)[0]
        (y * up).sum().backward()
        found = {name: p.grad for name, p in part.named_parameters()}
        found = to_our_names(theirs, found) if part is theirs else found
        sides.append({"output": y, "x": own.grad} | found)
    assert sides[0].keys() == sides[1].keys()
    for name, expected in sides[0].items():
        assert_same(sides[1][name], expected, 2e-5, name)


@every_type
def test_weights_go_there_and_back(model_type: str) -> None:
    theirs, other = (mixer(made(model_type, seed)).to(torch.float64) for seed in (0, 1))
    state = torch.random.get_rng_state()
    ours = to_gated_delta_rule(theirs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.requires_grad and p.dtype == torch.float64 for p in ours.parameters())
    kept = {name: t.clone() for name, t in theirs.state_dict().items()}
    from_gated_delta_rule(ours, other)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for side in (theirs, other):
        assert side.state_dict().keys() == kept.keys()
        assert all(torch.equal(side.state_dict()[name], t) for name, t in kept.items())


def test_what_cannot_be_converted() -> None:
    with pytest.raises(MemspanError, match="Linear is not a layer that can be converted; these"):
        to_gated_delta_rule(nn.Linear(2, 2))
    theirs = mixer(made("olmo_hybrid"))
    ours = to_gated_delta_rule(theirs)
    with pytest.raises(MemspanError, match="has False as negative_eigenvalues, and our layer True"):
        from_gated_delta_rule(ours, mixer(made()))
    theirs.o_norm.variance_epsilon = 1e-3
    with pytest.raises(MemspanError, match=r"has 0\.001 as the epsilon .* and our layer 1e-05"):
        from_gated_delta_rule(ours, theirs)
    theirs.activation = "relu"
    with pytest.raises(MemspanError, match="are followed by relu, ours by silu"):
        to_gated_delta_rule(theirs)
    nn.utils.parametrize.register_parametrization(theirs.q_proj, "weight", nn.Identity())
    with pytest.raises(MemspanError, match=r"not those that are known, as 'q_proj\.param.*: merge"):
        to_gated_delta_rule(theirs)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@every_implementation
def test_it_is_the_naive_form_of_fla(implementation: str, form: str) -> None:
    """Both compute in float32, whatever they are given."""
    pytest.importorskip("einops")
    if (package := importlib.util.find_spec("fla")) is None:
        pytest.skip("needs flash-linear-attention")
    # The file alone: the package needs Triton.
    file = Path(package.submodule_search_locations[0], "ops/gated_delta_rule/naive.py")
    function = runpy.run_path(str(file))[f"naive_{form}_gated_delta_rule"]
    q, v = torch.randn(2, 2, 128, 3, 16).unbind()
    k = F.normalize(torch.randn(2, 128, 3, 16), dim=-1)
    beta, g = 2 * torch.rand(2, 128, 3), -F.softplus(torch.randn(2, 128, 3))
    state = torch.randn(2, 3, 16, 16)
    expected = function(q=q, k=k, v=v, beta=beta, g=g, initial_state=state, output_final_state=True)
    heads = [t.transpose(1, 2) for t in (q / 4, k, v, beta)]
    found = delta_rule(*heads, state, log_decay=g.transpose(1, 2), implementation=implementation)
    assert_same(found[0].transpose(1, 2), expected[0], 2e-5, "output")
    assert_same(found[1], expected[1], 2e-5, "state")


# ----- Our operations in their layers


def learned(model: Any, ids: Tensor) -> Tensors:
    """Logits, the gradient of every parameter, and logits of a padded row read in pieces."""
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    mask, past, pieces = torch.ones_like(ids), None, []
    mask[0, :20] = 0
    with torch.no_grad():
        for part in ids.split([*(1, 70, 1, 1), ids.shape[1] - 73], 1):
            n = part.shape[1] + (0 if past is None else past.get_seq_length())
            piece = model(part, mask[:, :n], use_cache=True, **{CACHE: past})
            pieces.append(piece.logits[1:])
            past = piece[CACHE]
    return found | {"logits": output.logits.detach(), "pieces": torch.cat(pieces, 1)}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """Where a gradient is small beside all others, by those."""
    assert found.keys() == expected.keys()
    outputs = ("logits", "pieces")
    least = 1e-3 * max(float(t.abs().max()) for n, t in expected.items() if n not in outputs)
    for name, t in expected.items():
        if name in outputs:
            assert_same(found[name], t, 2e-5, name)
        else:
            assert (found[name] - t).abs().max() <= 1e-4 * max(t.abs().max(), least), name


@pytest.mark.smoke
@every_type
def test_logits_and_gradients(model_type: str) -> None:
    """Over three chunks of theirs."""
    model = made(model_type)
    ids = tokens(model)
    before, names = learned(model, ids), model.state_dict().keys()
    options = model.config.to_dict()
    with accelerate(model) as handle:
        assert "forward" in vars(mixer(model))
        assert_equal(learned(model, ids), before)
        assert model.state_dict().keys() == names
        assert model.config.to_dict() == options
    after = learned(model, ids)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    handle.remove()


def test_gradients_of_gradients_are_refused() -> None:
    """They were dropped in silence."""
    model = made()
    layer = mixer(model)
    weights = list(layer.parameters())
    x = torch.randn(2, 9, model.config.hidden_size)

    def hessian_vector() -> Any:
        first = torch.autograd.grad(layer(x).sin().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in first), weights)

    with accelerate(model), pytest.raises(MemspanError, match=r"create_graph.*undo accelerate\(\)"):
        hessian_vector()
    assert max(float(g.abs().max()) for g in hessian_vector()) > 0


def change(model: Any) -> None:
    """A subclass, a module in place of another, and hooks of every kind."""
    layer = mixer(model)
    layer.__class__ = type("Own", (type(layer),), {})
    old = layer.in_proj_qkv
    layer.in_proj_qkv = nn.Sequential(old, nn.Linear(old.out_features, old.out_features))
    layer.in_proj_z.register_forward_hook(lambda module, inputs, y: y * 1.5)
    layer.norm.register_forward_hook(lambda module, inputs, y: y - 0.1)
    layer.register_forward_hook(lambda module, inputs, y: y.tanh())
    layer.register_forward_pre_hook(lambda module, inputs: None)


@pytest.mark.parametrize("first", [True, False])
def test_what_others_did_to_a_layer_counts(first: bool) -> None:
    model = made()
    ids = tokens(model)
    plain = learned(model, ids)["logits"]
    for act in (change, accelerate) if first else (accelerate, change):
        act(model)
    found = learned(model, ids)
    accelerate(model).remove()
    assert "forward" not in vars(mixer(model))
    expected = learned(model, ids)
    assert_equal(found, expected)
    assert not torch.allclose(plain, expected["logits"], atol=1e-3)


@pytest.mark.parametrize("autocast", [True, False])
@torch.no_grad()
def test_bfloat16(autocast: bool) -> None:
    """No further from float32 than theirs."""
    model = made()
    exact = model(tokens(model)).logits
    model = model if autocast else model.bfloat16()
    errors = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens(model)).logits
        assert logits.dtype == torch.bfloat16
        errors.append(float((logits - exact).norm()))
        accelerate(model)
    assert 0 < errors[1] < 1.2 * errors[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled() -> None:
    """As one graph, with our functions in it."""
    layer = mixer(made())
    x = torch.randn(2, 70, layer.hidden_size)
    expected, graphs = layer(x), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    accelerate(layer)
    found = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert_same(found, expected, 2e-5, "output")
    (graph,) = graphs
    assert "autograd_function_apply" in str(graph.graph)


def test_copies_are_accelerated_by_themselves() -> None:
    model = made()
    expected = model(tokens(model)).logits
    accelerate(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert mixer(copies[0]).forward.__self__ is mixer(copies[0])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    for module in copies:
        assert_same(module(tokens(model)).logits, expected, 2e-5, "copy")
        accelerate(module).remove()
        assert "forward" not in vars(mixer(module))
        assert torch.equal(module(tokens(model)).logits, expected)
    assert "forward" in vars(mixer(model))


def test_the_guide(own_folders: Path) -> None:
    made().save_pretrained("path/to/model")
    names = pages.run(GUIDE)
    assert "forward" in vars(mixer(names["model"]))
    names["handle"].remove()


def test_the_guide_shows_what_was_measured() -> None:
    results = GUIDE.parents[2] / "benchmarks" / "results" / "gated-delta-models.json"
    ratios = [row["ratio"] for row in json.loads(results.read_text())["rows"]]
    known = {"{middle:.2f} ({low:.2f}\N{EN DASH}{high:.2f})".format(**r) for r in ratios}
    shown = re.findall(r"[\d.]+ \([\d.]+\N{EN DASH}[\d.]+\)", GUIDE.read_text(encoding="utf-8"))
    assert {*shown} == known


def refused(model: nn.Module) -> str:
    before = {name: vars(m).get("forward") for name, m in model.named_modules()}
    with pytest.raises(MemspanError) as caught:
        accelerate(model)
    assert before == {name: vars(m).get("forward") for name, m in model.named_modules()}
    return str(caught.value)


def test_models_without_such_layers_and_on_other_devices() -> None:
    assert "LlamaForCausalLM has no gated-delta layers" in refused(build("llama").module)
    assert "has no gated-delta layers" in refused(build("kimi_linear").module)
    assert "layers.0.linear_attn (Qwen3_5GatedDeltaNet) is on meta" in refused(made().to("meta"))


def test_another_forward_pass() -> None:
    class Own(Qwen3NextGatedDeltaNet):
        def forward(self, *inputs: Any, **others: Any) -> Any:
            return 2 * super().forward(*inputs, **others)

    model = made("qwen3_next")
    mixer(model).__class__ = Own
    assert "(Own) does not call torch_chunk_gated_delta_rule" in refused(model)
    model = made()
    handle = accelerate(model)
    mixer(model).forward = own = lambda *inputs, **others: None
    assert "has been replaced, perhaps by hooks" in refused(model)
    handle.remove()
    assert mixer(model).forward is own


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("causal_conv1d_fn", lambda f: lambda x, w, **k: 2 * f(x, w, **k)),
        ("torch_chunk_gated_delta_rule", lambda f: lambda *x, scale=None, **k: f(*x, **k)),
    ],
)
def test_other_functions(
    name: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of transformers may compute otherwise."""
    model = made("olmo_hybrid")
    function = getattr(modeling_olmo_hybrid, name)
    monkeypatch.setattr(modeling_olmo_hybrid, name, change(function))
    assert f"does not call {name} as it is known here" in refused(model)


def test_packed_documents_are_refused_as_before() -> None:
    layer = mixer(made())
    x, cuts = torch.randn(1, 9, layer.hidden_size), torch.tensor([0, 4, 9])
    for _ in range(2):
        for packed in ({"cu_seq_lens_q": cuts}, {"seq_idx": cuts}):
            with pytest.raises(ValueError, match="can't keep packed sequences apart"):
                layer(x, **packed)
        accelerate(layer)


def test_kernels_are_called_on_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fla and causal-conv1d are installed and Triton finds no driver."""
    model = made("olmo_hybrid")

    def stops(*given: Any, **options: Any) -> Any:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    for name in _OURS:
        plain = inspect.unwrap(getattr(modeling_olmo_hybrid, name))
        kernel = functools.update_wrapper(functools.partial(stops), plain)
        monkeypatch.setattr(modeling_olmo_hybrid, name, kernel)
    ids = tokens(model)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(ids)
    _accelerated.cache_clear()
    accelerate(model)
    learned(model, ids)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model.to("meta")(ids.to("meta"))
    _accelerated.cache_clear()
