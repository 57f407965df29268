"""Our operations in the gated-delta layers of transformers' models: nothing changes but the time."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import memspan
from golden import assert_same
from memspan.errors import MemspanError
from memspan.integrations.transformers import accelerate
from memspan.integrations.transformers.accelerate import _OURS, _accelerated
from memspan.stateful.recipes import build
from pages import blocks

TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
Tensors = dict[str, Tensor]
# transformers says in every process once that its own functions are slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference")


def made(model_type: str = "qwen3_5_text") -> Any:
    module: Any = build(model_type).module
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            # Beside stronger decays their differences of sums over a chunk are less exact than 2e-5.
            parameter.data.uniform_(-3, 0)
    return module


def mixer(model: Any) -> Any:
    return model.model.layers[0].linear_attn


def tokens(model: Any, length: int = 150, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (rows, length), generator=generator)


def learned(model: Any, ids: Tensor) -> Tensors:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    output = model(ids, labels=ids)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """Where a gradient is small beside all others, by those."""
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(t.abs().max()) for n, t in expected.items() if n != "logits")
    for name, t in expected.items():
        if name == "logits":
            assert_same(found[name], t, 2e-5, name)
        else:
            assert (found[name] - t).abs().max() <= 1e-4 * max(t.abs().max(), least), name


@pytest.mark.smoke
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_gradients(model_type: str) -> None:
    """Over three chunks of theirs."""
    model = made(model_type)
    ids = tokens(model)
    before, names = learned(model, ids), model.state_dict().keys()
    with accelerate(model) as handle:
        assert "forward" in vars(mixer(model))
        assert_equal(learned(model, ids), before)
        assert model.state_dict().keys() == names
    after = learned(model, ids)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    handle.remove()


def test_the_laws_hold_as_before() -> None:
    """Of single tokens and padding among them."""
    laws = ("cuts", "rows", "padding-left")
    verdicts = []
    for act in (lambda module: None, accelerate):
        model = build("qwen3_next")
        act(model.module)
        report = memspan.check(model, laws, budget=120)
        verdicts.append({f.law: f.outcome for f in report.findings})
    assert verdicts[0] == verdicts[1]
    assert "holds" in verdicts[0].values()


def replaced(model: Any) -> None:
    old = mixer(model).in_proj_qkv
    mixer(model).in_proj_qkv = nn.Sequential(old, nn.Linear(old.out_features, old.out_features))


def hooks(model: Any) -> None:
    mixer(model).in_proj_z.register_forward_hook(lambda module, inputs, y: y * 1.5)
    mixer(model).norm.register_forward_hook(lambda module, inputs, y: y - 0.1)
    mixer(model).register_forward_hook(lambda module, inputs, y: y.tanh())
    mixer(model).register_forward_pre_hook(lambda module, inputs: None)


def subclass(model: Any) -> None:
    class Own(type(mixer(model))):  # type: ignore[misc]
        pass

    mixer(model).__class__ = Own


@pytest.mark.parametrize("change", [replaced, hooks, subclass])
@pytest.mark.parametrize("first", [True, False])
def test_what_others_did_to_a_layer_counts(change: Callable[[Any], None], first: bool) -> None:
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
    changed = not torch.allclose(plain, expected["logits"], atol=1e-3)
    assert changed == (change is not subclass)


@pytest.mark.parametrize("autocast", [True, False])
@torch.no_grad()
def test_bfloat16(autocast: bool) -> None:
    """No further from float32 than theirs."""
    model = made().eval()
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


def test_copies_and_files(tmp_path: Path) -> None:
    model = made()
    expected = model(tokens(model)).logits
    model.save_pretrained(tmp_path / "before")
    accelerate(model)
    other = copy.deepcopy(model)
    assert mixer(other).forward.__self__ is mixer(other)
    pickled = pickle.loads(pickle.dumps(model))
    model.save_pretrained(tmp_path / "after")
    for name in ("model.safetensors", "config.json"):
        before, after = (tmp_path / folder / name for folder in ("before", "after"))
        assert before.read_bytes() == after.read_bytes()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    for module in (other, pickled):
        assert_same(module(tokens(model)).logits, expected, 2e-5, "copy")
        accelerate(module).remove()
        assert "forward" not in vars(mixer(module))
        assert torch.equal(module(tokens(model)).logits, expected)
    assert "forward" in vars(mixer(model))


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "accelerate.md"


def test_the_guide(own_folders: Path) -> None:
    made().save_pretrained("path/to/model")
    names: dict[str, Any] = {}
    for _, block in blocks(GUIDE):
        exec(compile(block, str(GUIDE), "exec"), names)
    assert "forward" in vars(mixer(names["model"]))
    names["handle"].remove()


def test_the_guide_shows_what_was_measured() -> None:
    results = GUIDE.parents[2] / "benchmarks" / "results" / "gated-delta-models.json"
    ratios = [row["ratio"] for row in json.loads(results.read_text())["rows"]]
    known = {"{middle:.2f} ({low:.2f}\N{EN DASH}{high:.2f})".format(**r) for r in ratios}
    shown = re.findall(r"[\d.]+ \([\d.]+\N{EN DASH}[\d.]+\)", GUIDE.read_text(encoding="utf-8"))
    assert {*shown} == known


# ----- What is refused


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


def test_elsewhere_theirs_are_called() -> None:
    layer = mixer(made())
    accelerate(layer)
    layer.to("meta")
    x = torch.randn(2, 9, layer.hidden_size, device="meta")
    assert layer(x).shape == x.shape


def test_without_a_gpu_kernels_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fla and causal-conv1d are installed and Triton finds no driver."""
    model = made("olmo_hybrid")

    def stops(*given: Any, **options: Any) -> Any:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    for name in _OURS:
        plain = inspect.unwrap(getattr(modeling_olmo_hybrid, name))
        kernel = functools.update_wrapper(functools.partial(stops), plain)
        monkeypatch.setattr(modeling_olmo_hybrid, name, kernel)
    ids = tokens(model, 20)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(ids)
    _accelerated.cache_clear()
    accelerate(model)
    model(ids, labels=ids).loss.backward()
    assert model.generate(ids, max_new_tokens=4, pad_token_id=0).shape == (2, 24)
    _accelerated.cache_clear()
