"""Fast weights against three independent implementations: every output, state and gradient.

One test per recorded configuration, read from its JSON. What a peer does differently, such as a norm
that is missing or in another place, is put together here from our pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from golden import Golden, assert_same, parameters
from memspan.converters.labml import MODULES
from memspan.models import FastWeights, FastWeightsMemory
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.feature_maps import dpfp, elu_plus_one, favor, sum_to_one
from memspan.ops.fast_weights.rules import delta_rule, sum_rule

pytestmark = pytest.mark.golden

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
IMPLEMENTATIONS = ["chunked", "reference"]
if delta_rule_loop.available(torch.zeros((), dtype=torch.float64)):
    IMPLEMENTATIONS.append("compiled")


def batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def check_loss(golden: Golden, key: str, products: Tensor) -> Tensor:
    """The sum of ``products``, whose terms may cancel."""
    error = (products.detach().double().sum() - golden[key]).abs()
    assert error <= TOLERANCE[products.dtype] * products.detach().abs().sum(), key
    return products.sum()


def check_gradients(golden: Golden, named: dict[str, Tensor]) -> None:
    """Of every parameter under the peer's name; the peer gives none where it uses none."""
    for name, parameter in named.items():
        key = f"f64.grad.{name}"
        if key in golden:
            assert parameter.grad is not None, name
            assert_same(parameter.grad, golden[key], TOLERANCE[parameter.dtype], key)
        else:
            assert name in golden.json["parameters_without_gradient"], name


# ----- labml: the whole stack, whose layers have a norm that they never use


@every_dtype
@pytest.mark.parametrize("path", parameters("labml_fast_weights"))
def test_labml(path: Path, dtype: torch.dtype) -> None:
    golden, tolerance = Golden(path), TOLERANCE[dtype]
    options = {name: golden.config[name] for name in ("n_layers", "d_model", "d_ff", "nu")}
    options |= {"n_heads": golden.config["heads"], "epsilon": golden.config["eps"]}
    model = FastWeightsConfig(**options, norm="feed-forward").build().to(dtype)
    theirs = dict(golden.named("param."))
    unused = {name: theirs.pop(name) for name in list(theirs) if ".norm_self_attn." in name}
    ours = {}
    for name, parameter in model.named_parameters():
        for their_module, our_module in MODULES[FastWeightsConfig].items():
            name = name.replace(f".{our_module}.", f".{their_module}.")
        ours[name.replace("final_norm", "norm")] = parameter
    assert set(ours) == set(theirs)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])

    x = golden.input("x", dtype).requires_grad_()
    out = model(batch_first(x)).hidden.transpose(0, 1)
    assert_same(out, golden["f64.out"], tolerance, "out")
    check_loss(golden, "f64.loss", out * golden.input("w", dtype)).backward()
    assert x.grad is not None
    assert_same(x.grad, golden["f64.gradin.x"], tolerance, "gradient of x")
    check_gradients(golden, ours | unused)

    check_labml_layer(golden, model, batch_first(x).detach())
    with torch.no_grad():
        check_labml_segments(golden, model.eval(), batch_first(x).detach())
    assert not golden.unseen("f64.")


def check_labml_layer(golden: Golden, model: FastWeights, x: Tensor) -> None:
    """What happens within the first layer, token and head by token and head."""
    attention = next(model.stack()).attention
    q, k, v, beta = attention.project(x)
    assert beta is not None
    found = {
        "phi_query": attention.features(q),
        "phi_key": attention.features(k),
        "value": v,
        "beta": beta.sigmoid()[..., None],
    }
    for name, tensor in found.items():
        expected = golden[f"f64.layer0.{name}"]
        assert_same(tensor.permute(2, 0, 1, 3), expected, TOLERANCE[x.dtype], name)
    out, _ = attention(x)
    expected = golden["f64.layer0.attn_out"]
    assert_same(out.transpose(0, 1), expected, TOLERANCE[x.dtype], "attn_out")


def check_labml_segments(golden: Golden, model: FastWeights, x: Tensor) -> None:
    """Their token-wise form, its state kept: our segments, and our reader token by token."""
    memory: FastWeightsMemory | None = None
    reader, tolerance = model.reader(None, len(x)), TOLERANCE[x.dtype]
    for i, segment in enumerate(x.split(golden.config["segments"], 1)):
        output = model(segment, memory)
        memory = output.memory
        by_token = torch.cat([reader.read(token) for token in segment.split(1, 1)], 1)
        for hidden, after in ((output.hidden, memory), (by_token, reader.memory)):
            expected = golden[f"f64.seg{i}.tokenwise_out"]
            assert_same(hidden.transpose(0, 1), expected, tolerance, f"segment {i}")
            for n in range(golden.config["n_layers"]):
                state = golden[f"f64.seg{i}.fast_weights{n}"]
                assert_same(after.weights[:, n].mT, state, tolerance, f"segment {i} layer {n}")


# ----- flash-linear-attention: the bare recurrences, queries scaled


@every_dtype
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", parameters("fla_delta_rule"))
def test_fla(path: Path, implementation: str, dtype: torch.dtype) -> None:
    golden, tolerance = Golden(path), TOLERANCE[dtype]
    config = golden.config
    names = [n.removeprefix("in.") for n in golden.tensors if n.startswith("in.")]
    delta, normalised = "beta" in names, config.get("normalize", False)
    given = {n: golden.input(n, dtype) for n in names}
    leaves = {n: t.requires_grad_() for n, t in given.items() if not n.startswith("w_")}

    # The delta rule's layout is [B, H, T, K], linear attention's [B, T, H, K].
    def heads_first(x: Tensor) -> Tensor:
        return x if delta else x.transpose(1, 2)

    q, k, v = (heads_first(leaves[n]) for n in "qkv")
    q = q * config["K"] ** -0.5
    empty = torch.zeros(config["B"], config["H"], config["K"], config["V"], dtype=dtype)
    state = leaves.get("initial_state", empty)
    if delta:
        y, state = by_channel(q, k, v, leaves["beta"], state, implementation)
    elif normalised:
        # [B, 1, H, K], as is their final z.
        z = leaves.get("initial_z", empty[:, None, ..., 0])
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        start = torch.cat([state, z.squeeze(1)[..., None]], -1)
        y, after = sum_rule(q, k, ones, start, implementation=implementation)
        y, state = y[..., :-1] / (y[..., -1:] + 1e-10), after[..., :-1]
        assert_same(after[..., -1][:, None], golden["f64.final_z"], tolerance, "final_z")
    else:
        y, state = sum_rule(q, k, v, state, implementation=implementation)
    y = heads_first(y)
    assert_same(y, golden["f64.o"], tolerance, "o")
    assert_same(state, golden["f64.final_state"], tolerance, "final_state")
    products = torch.cat([(y * given["w_o"]).flatten(), (state * given["w_state"]).flatten()])
    check_loss(golden, "f64.loss", products).backward()
    for name, expected in golden.named("f64.gradin."):
        assert leaves[name].grad is not None, name
        assert_same(leaves[name].grad, expected, tolerance, f"gradient of {name}")
    assert not golden.unseen("f64.")


def by_channel(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, implementation: str
) -> tuple[Tensor, Tensor]:
    """The delta rule; where beta has an entry per value channel, each channel as a head of its own."""
    options: dict[str, Any] = {"implementation": implementation}
    if beta.dim() < v.dim():
        return delta_rule(q, k, v, beta, state, **options)
    n = v.shape[-1]

    def apart(x: Tensor) -> Tensor:
        """``[B, H, T or K, V] -> [B, H * V, T or K]``."""
        return x.movedim(-1, 2).flatten(1, 2)

    q, k = (x.repeat_interleave(n, 1) for x in (q, k))
    y, after = delta_rule(
        q, k, apart(v)[..., None], apart(beta), apart(state)[..., None], **options
    )
    y, after = (x[..., 0].unflatten(1, (-1, n)).movedim(2, -1) for x in (y, after))
    return y, after


# ----- IDSIA, the paper's authors: attention layers with residual and norm


@every_dtype
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("path", parameters("idsia_fwp"))
def test_idsia(path: Path, implementation: str, dtype: torch.dtype) -> None:
    golden, tolerance = Golden(path), TOLERANCE[dtype]
    layer = IDSIALayer(golden, implementation, dtype)
    inputs, states, products = [], [], []
    for i in golden.segments:
        h = golden.input(f"seg{i}.h", dtype).requires_grad_()
        inputs.append(h)
        out = layer(batch_first(h)).transpose(0, 1)
        prefix = f"f64.seg{i}."
        assert_same(out, golden[f"{prefix}out"], tolerance, f"{prefix}out")
        states.append(layer.state)
        if f"{prefix}key_sum" in golden:
            z = layer.key_sum[:, :, None]
            assert_same(z, golden[f"{prefix}key_sum"], tolerance, f"{prefix}key_sum")
        products.append(out * golden.input(f"seg{i}.w", dtype))
        check_loss(golden, f"{prefix}loss", products[-1])
    if layer.recurrent:
        check_states(golden, states)
    check_loss(golden, "f64.loss", torch.cat([p.flatten() for p in products])).backward()
    for i, h in enumerate(inputs):
        assert h.grad is not None
        assert_same(h.grad, golden[f"f64.gradin.seg{i}.h"], tolerance, f"gradient of segment {i}")
    check_gradients(golden, layer.parameters)
    if "in.prime_test_x" in golden:
        x = golden.input("prime_test_x", dtype)
        assert_same(layer.map(x), golden["f64.prime_test"], tolerance, "favor alone")
    assert not golden.unseen("f64.")


def check_states(golden: Golden, ours: list[Tensor]) -> None:
    """The fast weights after every segment.

    The peer writes into the tensor that it was given, and the recording kept that tensor: what is
    called the state after segment ``i`` is then the one after ``i + 1``, and the last two are equal,
    which states after different texts cannot be. Where the recording is not like that, state ``i``
    is compared with our state ``i``.
    """
    theirs = [golden[f"f64.seg{i}.state"] for i in golden.segments]
    written_to = len(theirs) > 1 and torch.equal(theirs[-1], theirs[-2])
    for i, expected in enumerate(theirs):
        at = min(i + 1, len(ours) - 1) if written_to else i
        assert_same(ours[at], expected, TOLERANCE[ours[at].dtype], f"state {i}")


class IDSIALayer:
    """Their layers, recurrent or quadratic, of our rules and feature maps."""

    def __init__(self, golden: Golden, implementation: str, dtype: torch.dtype) -> None:
        self.config = config = golden.config
        self.golden, self.name = golden, config["cls"]
        self.options: dict[str, Any] = {"implementation": implementation}
        self.parameters = {
            name: tensor.to(dtype).requires_grad_() for name, tensor in golden.named("param.")
        }
        self.recurrent = self.name.startswith("Cuda")
        self.delta = self.recurrent and "Sum" not in self.name
        # What the peer takes where its options are not recorded.
        undivided = self.delta and ("Linear" in self.name or "Performer" in self.name)
        self.divided = not config.get("skip_attn_normalization", undivided)
        self.sums_to_one = config.get("use_sum_norm", "Sum" not in self.name)
        self.n_rolls = config.get("n_roll", 2 if self.recurrent else 3)
        self.state = self.key_sum = torch.empty(0)
        self.started = False

    def __call__(self, h: Tensor) -> Tensor:
        pre = self.config["pre_lnorm"]
        normed = self.norm(h) if pre else h
        q, k, v, beta = self.heads(h, normed)
        q, k = self.map(q), self.map(k)
        if not self.started or not self.recurrent:
            self.state = v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
            self.key_sum = self.state[..., 0]
        y = self.recur(q, k, v, beta) if self.recurrent else self.attend(q, k, v)
        self.started = True
        out = F.linear(y.transpose(1, 2).flatten(2), self.parameters["o_net.weight"])
        if not pre:
            return self.norm(h + out)
        # The recurrent layers go on from the normalised input, the quadratic ones from the raw.
        return (normed if self.recurrent else h) + out

    def norm(self, h: Tensor) -> Tensor:
        gain, bias = (self.parameters[f"layer_norm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(h, h.shape[-1:], gain, bias)

    def heads(self, h: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values ``[B, H, T, K]`` and beta ``[B, H, T]``."""
        n, width = self.config["n_head"], self.config["d_head"]
        if not self.recurrent:
            q = F.linear(h, self.parameters["q_net.weight"])
            k, v = F.linear(normed, self.parameters["kv_net.weight"]).chunk(2, -1)
            q, k, v = (t.unflatten(-1, (n, width)).transpose(1, 2) for t in (q, k, v))
            return q, k, v, None
        name = "qkvb_net.weight" if self.delta else "qkv_net.weight"
        x = F.linear(normed, self.parameters[name]).unflatten(-1, (n, -1)).transpose(1, 2)
        q, k, v = (x[..., i * width : (i + 1) * width] for i in range(3))
        return q, k, v, x[..., -1].sigmoid() if self.delta else None

    def map(self, x: Tensor) -> Tensor:
        if "DPFP" in self.name:
            return dpfp(x, self.n_rolls)
        if "Performer" in self.name:
            return favor(x, self.golden.input("proj_matrix", x.dtype))
        return elu_plus_one(x)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        """Memory carried, no gradient through it."""
        if self.sums_to_one:
            # Without an epsilon.
            q, k = sum_to_one(q, 0.0), sum_to_one(k, 0.0)
        state, key_sum = self.state.detach(), self.key_sum.detach()[..., None]
        ones = torch.ones_like(v[..., :1])
        z_q, after = sum_rule(q, k, ones, key_sum, **self.options)
        if self.divided and "Norm" in self.name:
            earlier = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
            overlap, _ = sum_rule(k, earlier, ones, key_sum, **self.options)
            if not self.started:
                overlap = torch.cat([torch.ones_like(overlap[:, :, :1]), overlap[:, :, 1:]], 2)
            assert beta is not None
            beta = beta * overlap[..., 0]
            k = k / (overlap + self.config["eps"])
        if beta is not None:
            y, self.state = delta_rule(q, k, v, beta, state, **self.options)
        else:
            y, self.state = sum_rule(q, k, v, state, **self.options)
        self.key_sum = after[..., 0]
        y = y * self.config["d_head"] ** -0.5
        return y / (z_q + self.config["eps"]) if self.divided else y

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The quadratic layers: the same sums, of the scaled scores; every sequence by itself."""
        q = q * self.config["d_head"] ** -0.5
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        start = F.pad(self.state, (0, 1))
        y, _ = sum_rule(q, k, ones, start, **self.options)
        return y[..., :-1] / (y[..., -1:] + self.config["eps"])
