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

from golden import Golden, in_both_precisions, parameters
from memspan.models import FastWeights
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.feature_maps import dpfp, elu_plus_one, favor, sum_to_one
from memspan.ops.fast_weights.rules import delta_rule, sum_rule
from recorded_models import model_of

pytestmark = pytest.mark.golden

IMPLEMENTATIONS = ["chunked", "reference"]
if delta_rule_loop.available(torch.zeros((), dtype=torch.float64)):
    IMPLEMENTATIONS.append("compiled")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


# ----- labml: the whole stack


@pytest.mark.parametrize("path", parameters("labml_fast_weights"))
def test_labml(path: Path, tmp_path: Path) -> None:
    for g in in_both_precisions(path):
        model, rows = model_of(g, tmp_path / str(g.dtype))
        x = g.input("x").requires_grad_()
        out = model.backbone(batch_first(x)).hidden.transpose(0, 1)
        g.check("out", out)
        g.score("", out * g.input("w"))
        g.backward()
        g.check("gradin.x", x.grad)
        g.check_gradients(rows)
        with torch.no_grad():
            check_first_layer(g, model.backbone, batch_first(x))
            check_segments(g, model.backbone, batch_first(x))


@pytest.mark.parametrize("path", parameters("labml_fast_weights"))
def test_the_options_of_a_recording_are_honoured(path: Path, tmp_path: Path) -> None:
    """All options, including those that labml's files do not state."""
    g = Golden(path)
    g.config["eps"] = 0.01
    model, _ = model_of(g, tmp_path / "run")
    assert model.backbone.config.epsilon == 0.01


def check_first_layer(g: Golden, model: FastWeights, x: Tensor) -> None:
    """Its computation, token by token and head by head."""
    attention = next(model.stack()).attention
    q, k, v, beta = attention.project(x)
    features = {"phi_query": attention.features(q), "phi_key": attention.features(k)}
    found = features | {"value": v, "beta": beta.sigmoid()[..., None]}
    for name, tensor in found.items():
        g.check(f"layer0.{name}", tensor.permute(2, 0, 1, 3))
    g.check("layer0.attn_out", attention(x)[0].transpose(0, 1))


def check_segments(g: Golden, model: FastWeights, x: Tensor) -> None:
    """Their token-wise form, its state kept: our segments, and our reader token by token."""
    memory = model.initial_memory(len(x))
    reader = model.reader(None, len(x))
    for i, segment in enumerate(x.split(g.config["segments"], 1)):
        output = model(segment, memory)
        memory = output.memory
        by_token = torch.cat([reader.read(token) for token in segment.split(1, 1)], 1)
        for hidden, after in ((output.hidden, memory), (by_token, reader.memory)):
            g.check(f"seg{i}.tokenwise_out", hidden.transpose(0, 1))
            for n in range(len(model.layers)):
                g.check(f"seg{i}.fast_weights{n}", after.weights[:, n].mT)


# ----- flash-linear-attention: the bare recurrences, queries scaled


@every_implementation
@pytest.mark.parametrize("path", parameters("fla_delta_rule"))
def test_fla(path: Path, implementation: str) -> None:
    for g in in_both_precisions(path):
        check_rule(g, implementation)


def check_rule(g: Golden, implementation: str) -> None:
    c = g.config
    names = [n.removeprefix("in.") for n in g.tensors if n.startswith("in.")]
    delta = "beta" in names
    given = {n: g.input(n) for n in names}
    leaves = {n: t.requires_grad_() for n, t in given.items() if not n.startswith("w_")}

    # The delta rule's layout is [B, H, T, K], linear attention's [B, T, H, K].
    def heads_first(x: Tensor) -> Tensor:
        return x if delta else x.transpose(1, 2)

    q, k, v = (heads_first(leaves[n]) for n in "qkv")
    q = q * c["K"] ** -0.5
    empty = torch.zeros(c["B"], c["H"], c["K"], c["V"], dtype=g.dtype)
    state = leaves.get("initial_state", empty)
    if delta:
        y, state = by_channel(q, k, v, leaves["beta"], state, implementation)
    elif c.get("normalize", False):
        # [B, 1, H, K], as is their final z.
        z = leaves.get("initial_z", empty[:, None, ..., 0])
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        start = torch.cat([state, z.squeeze(1)[..., None]], -1)
        y, after = sum_rule(q, k, ones, start, implementation=implementation)
        y = y[..., :-1] / (y[..., -1:] + 1e-10)
        state = after[..., :-1]
        g.check("final_z", after[..., -1][:, None])
    else:
        y, state = sum_rule(q, k, v, state, implementation=implementation)
    y = heads_first(y)
    g.check("o", y)
    g.check("final_state", state)
    g.score("", y * given["w_o"], state * given["w_state"])
    g.backward()
    for name, leaf in leaves.items():
        g.check(f"gradin.{name}", leaf.grad)


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


@every_implementation
@pytest.mark.parametrize("path", parameters("idsia_fwp"))
def test_idsia(path: Path, implementation: str) -> None:
    for g in in_both_precisions(path):
        check_layer(g, IDSIALayer(g, implementation))


def check_layer(g: Golden, layer: IDSIALayer) -> None:
    inputs = [g.input(f"seg{i}.h").requires_grad_() for i in g.segments]
    states = []
    for i, h in enumerate(inputs):
        out = layer(batch_first(h)).transpose(0, 1)
        states.append(layer.state)
        g.check(f"seg{i}.out", out)
        g.check(f"seg{i}.key_sum", layer.key_sum[:, :, None])
        g.score(f"seg{i}", out * g.input(f"seg{i}.w"))
    if layer.recurrent:
        check_states(g, states)
    g.backward()
    for i, h in enumerate(inputs):
        g.check(f"gradin.seg{i}.h", h.grad)
    g.check_gradients(layer.parameters)
    if "in.prime_test_x" in g:
        g.check("prime_test", layer.map(g.input("prime_test_x")))


def check_states(g: Golden, ours: list[Tensor]) -> None:
    """The fast weights after every segment.

    The peer writes into the tensor that it was given, and the recording kept that tensor: what is
    called the state after segment ``i`` is then the one after ``i + 1``, and the last two are equal,
    which states after different texts cannot be. Where the recording is not like that, state ``i``
    is compared with our state ``i``.
    """
    theirs = [g[f"f64.seg{i}.state"] for i in g.segments]
    written_to = len(theirs) > 1 and torch.equal(theirs[-1], theirs[-2])
    for i in g.segments:
        g.check(f"seg{i}.state", ours[min(i + 1, len(ours) - 1) if written_to else i])


class IDSIALayer:
    """Their layers, recurrent or quadratic, of our rules and feature maps."""

    def __init__(self, g: Golden, implementation: str) -> None:
        self.config = config = g.config
        self.golden = g
        self.name = config["cls"]
        self.parameters = g.leaves()
        self.options: dict[str, Any] = {"implementation": implementation}
        self.recurrent = self.name.startswith("Cuda")
        self.delta = self.recurrent and "Sum" not in self.name
        # What the peer takes where its options are not recorded.
        undivided = self.delta and ("Linear" in self.name or "Performer" in self.name)
        skips = config.get("skip_attn_normalization", undivided)
        self.divided = not (self.recurrent and skips)
        self.sums_to_one = config.get("use_sum_norm", "Sum" not in self.name)
        self.n_rolls = config.get("n_roll", 2 if self.recurrent else 3)
        self.state = self.key_sum = torch.empty(0)

    def __call__(self, h: Tensor) -> Tensor:
        pre = self.config["pre_lnorm"]
        normed = self.norm(h) if pre else h
        q, k, v, beta = self.heads(h, normed)
        y = self.recur(self.map(q), self.map(k), v, beta)
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
        n = self.config["n_head"]
        width = self.config["d_head"]
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
            return favor(x, self.golden.input("proj_matrix"))
        return elu_plus_one(x)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        """Memory carried, no gradient through it. The quadratic layers give the same sums, of scaled
        scores, with every sequence by itself."""
        scale = self.config["d_head"] ** -0.5
        started = self.recurrent and self.state.numel() > 0
        if not started:
            self.state = v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
            self.key_sum = self.state[..., 0]
        if not self.recurrent:
            q = q * scale
            scale = 1.0
        elif self.sums_to_one:
            # Without an epsilon.
            q = sum_to_one(q, 0.0)
            k = sum_to_one(k, 0.0)
        state = self.state.detach()
        key_sum = self.key_sum.detach()[..., None]
        ones = torch.ones_like(v[..., :1])
        z_q, after = sum_rule(q, k, ones, key_sum, **self.options)
        if self.divided and beta is not None and "Norm" in self.name:
            earlier = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
            overlap, _ = sum_rule(k, earlier, ones, key_sum, **self.options)
            if not started:
                overlap = torch.cat([torch.ones_like(overlap[:, :, :1]), overlap[:, :, 1:]], 2)
            beta = beta * overlap[..., 0]
            k = k / (overlap + self.config["eps"])
        if beta is not None:
            y, self.state = delta_rule(q, k, v, beta, state, **self.options)
        else:
            y, self.state = sum_rule(q, k, v, state, **self.options)
        self.key_sum = after[..., 0]
        return y * scale / (z_q + self.config["eps"]) if self.divided else y * scale
