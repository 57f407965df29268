"""Fast Weights (Schlag, Irie, Schmidhuber 2021, arXiv 2102.11174): memory, layer and stack.

Every head has a matrix that each token writes to and reads from; that matrix is all the memory.
Options: :class:`memspan.models.FastWeightsConfig`. The rules and the feature
maps are in :mod:`memspan.ops.delta_rule`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.memory import Memory
from memspan.models.fast_weights.config import FastWeightsConfig
from memspan.models.initialisation import initialise
from memspan.models.output import BackboneOutput
from memspan.models.protocol import Backbone, BackboneReader, WriteRetention
from memspan.models.segments import Padding, read_in_pieces
from memspan.models.sizes import BYTES, refuse_oversized, refuse_oversized_model
from memspan.nn import FeedForward, dropout_layer, sinusoids
from memspan.ops.delta_rule import compiled as delta_rule_loop
from memspan.ops.delta_rule.feature_maps import (
    DPFP,
    elu_plus_one,
    favor,
    in_plain_autograd,
    orthogonal_projection,
    sum_to_one,
)
from memspan.ops.delta_rule.inputs import Chunking
from memspan.ops.delta_rule.rules import (
    IMPLEMENTATIONS,
    delta_rule,
    outer_product_rule,
    sum_rule,
)
from memspan.ops.implementations import refuse_unknown_implementation

FACTORS = {"query-key": 0.2, "value": 0.2, "beta": 0.2}
"""How parameters begin that write and read, where not as in other architectures: found by trial."""


@dataclass(frozen=True, repr=False)
class FastWeightsMemory(Memory):
    """The fast weights of every layer and head, in float32 or better."""

    weights: Tensor
    """``[B, L, H, F, V]``: features by values, the paper's W transposed."""
    key_sum: Tensor
    """``z``, the sum of all keys, ``[B, L, H, F]`` with normalisation attention; else ``F`` is 0."""
    feature_map: Tensor
    """Which feature map wrote the row, int64 ``[B]``: a number of the map, its options and, with
    favor, its draw. Weights written with one map mean nothing to another."""


class FastWeightsAttention(nn.Module):
    """Projections and feature map around one of the update rules."""

    projection: Tensor

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__()
        self.config = config
        self.n_heads = config.n_heads
        inner = config.n_heads * config.head_width
        # The outer-product rule reads with the input itself.
        if config.rule != "outer-product":
            self.query = nn.Linear(config.d_model, inner, bias=False)
        self.key = nn.Linear(config.d_model, inner, bias=False)
        self.value = nn.Linear(config.d_model, inner, bias=False)
        if config.rule == "delta":
            self.beta = nn.Linear(config.d_model, config.n_heads, bias=False)
        self.output = nn.Linear(inner, config.d_model)
        if config.feature_map == "favor":
            self.register_buffer("projection", self.drawn())

    def drawn(self) -> Tensor:
        """New random projections ``[K, m]`` for favor."""
        return orthogonal_projection(self.config.head_width, self.config.n_projections)

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, H*K] -> [B, H, T, K]``."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values ``[B, H, T, K]``, and beta's logits ``[B, H, T]`` (delta rule)."""
        inner = self.key.out_features
        widths = [inner] * (2 + hasattr(self, "query")) + [self.n_heads] * hasattr(self, "beta")
        parts = list(F.linear(x, self.fused_weight()).split(widths, -1))
        if self.config.rule == "outer-product":
            parts.insert(0, x)
        q, k, v = (self.heads(part) for part in parts[:3])
        return q, k, v, parts[3].transpose(1, 2) if len(parts) > 3 else None

    def fused_weight(self) -> Tensor:
        """The weights of all projections as one, in the order query, key, value, beta."""
        names = ("query", "key", "value", "beta")
        return torch.cat([getattr(self, n).weight for n in names if hasattr(self, n)])

    def feature_map(self) -> Callable[[Tensor], Tensor]:
        """Feature map and sum normalisation: ``[..., K] -> [..., F]``."""
        epsilon = self.config.epsilon if self.config.normalisation == "sum" else None
        if self.config.feature_map == "dpfp":
            return DPFP(self.config.nu, epsilon)
        return partial(self._features, epsilon=epsilon)

    def features(self, x: Tensor) -> Tensor:
        """The same, applied."""
        return self.feature_map()(x)

    def _features(self, x: Tensor, epsilon: float | None) -> Tensor:
        kind = self.config.feature_map
        if kind == "elu":
            x = elu_plus_one(x)
        elif kind == "favor":
            x = favor(x, self.projection.to(x.dtype))
        elif kind == "softmax":
            x = x.softmax(-1)
        return x if epsilon is None else sum_to_one(x, epsilon)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        key_sum: Tensor,
        implementation: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read ``x [B, T, D]`` after ``weights [B, H, F, V]`` and ``key_sum [B, H, F]``."""
        q, k, v, beta = self.project(x)
        # Sums over thousands of tokens need float32, whatever the precision of the products.
        q, k, v = (t.to(weights.dtype) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            y, weights, key_sum = self.write_and_read(
                q, k, v, beta, weights, key_sum, implementation
            )
        y = self.output(y.transpose(1, 2).flatten(2).to(x.dtype))
        return y, weights, key_sum

    def write_and_read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        weights: Tensor,
        key_sum: Tensor,
        implementation: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rule over a segment, and the denominator of attention normalisation."""
        config = self.config
        if config.rule == "outer-product":
            y, weights = outer_product_rule(q, k, v, weights, activation=config.outer_activation)
            return y, weights, key_sum
        options: Any = {
            "feature_map": self.feature_map(),
            "chunking": Chunking(config.chunk_size, config.recompute and torch.is_grad_enabled()),
            "implementation": implementation,
        }
        if beta is not None:
            beta = beta.to(weights.dtype).sigmoid()
        if config.normalisation != "attention":
            if beta is not None:
                y, weights = delta_rule(q, k, v, beta, weights, **options)
            else:
                y, weights = sum_rule(q, k, v, weights, **options)
            return y, weights, key_sum
        # z is the same recurrence as the sum rule's, with values of one.
        ones, z = torch.ones_like(v[..., :1]), key_sum.unsqueeze(-1)
        if beta is None:
            y, after = sum_rule(
                q, k, torch.cat([v, ones], -1), torch.cat([weights, z], -1), **options
            )
            y, by_query = y[..., :-1], y[..., -1:]
            weights, after = after[..., :-1], after[..., -1:]
        else:
            features = options.pop("feature_map")
            features = in_plain_autograd(features) if implementation == "reference" else features
            q, k = features(q), features(k)
            by_query, after = sum_rule(q, k, ones, z, **options)
            # Over earlier keys alone: taking a key's own part out of a sum with it would leave
            # rounding in its place, and the first token would divide by that.
            earlier = F.pad(k, (0, 0, 1, 0))[:, :, :-1]
            by_key, _ = sum_rule(k, earlier, ones, z, **options)
            overlap = self.overlap(by_key)
            y, weights = delta_rule(q, k / overlap, v, beta * overlap[..., 0], weights, **options)
        return y / (by_query + config.epsilon), weights, after.squeeze(-1)

    def kept(self, x: Tensor, key_sum: Tensor) -> Tensor:
        """Of the value that the first token of ``x [B, T, D]`` wrote, the share that its key reads
        after 0, 1, 2, ... further tokens: ``[B, H, T]``. ``key_sum [B, H, F]``: before the segment.

        The rules are linear in W, so that what a token wrote along its features ``f`` fades by itself,
        ``a <- a - beta k (k . a)`` from ``a = f`` with the delta rule; the share is ``a . f / f . f``.
        """
        _, k, _, beta = self.project(x)
        keys = self.features(k.to(key_sum.dtype))
        divides = self.config.normalisation == "attention"
        # z up to each token, its own key included.
        z = key_sum[:, :, None] + keys.cumsum(2) if divides else keys
        first = keys[:, :, 0]
        left, shares = first, []
        for t, key in enumerate(keys.unbind(2)):
            if t and beta is not None:
                strength = beta[:, :, t].to(keys.dtype).sigmoid()[..., None]
                if divides:
                    strength = strength / self.overlap((z[:, :, t - 1] * key).sum(-1, keepdim=True))
                left = left - strength * key * (key * left).sum(-1, keepdim=True)
            shares.append((left * first).sum(-1))
        # A key without features writes nothing, of which nothing is kept.
        tiny = torch.finfo(keys.dtype).tiny
        kept = torch.stack(shares, -1) / (first * first).sum(-1, keepdim=True).clamp(min=tiny)
        if divides:
            by_query = (z * first[:, :, None]).sum(-1) + self.config.epsilon
            kept = kept * by_query[..., :1] / by_query
        return kept

    def overlap(self, z_k: Tensor) -> Tensor:
        """``z(t-1) . k``, what attention normalisation divides a key's old value by.

        One where it is at most epsilon: no earlier key shares a feature with this one then, and the
        old value is 0 as well. No product in it is negative, so what should be 0 is exactly 0.
        """
        # Not z_k > epsilon, which would take NaN for one.
        return torch.where(z_k <= self.config.epsilon, 1.0, z_k)


class FastWeightsLayer(nn.Module):
    """Attention and feed-forward sub-layers, each within a residual; norms by ``config.norm``."""

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__()
        self.attention = FastWeightsAttention(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, config.activation, config.dropout
        )
        self.post = config.norm == "post"
        alone = config.norm == "feed-forward"
        self.attention_norm = nn.Identity() if alone else nn.LayerNorm(config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.dropout = dropout_layer(config.dropout)

    def before_attention(self, x: Tensor) -> Tensor:
        """What the attention reads."""
        return x if self.post else self.attention_norm(x)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """All that follows the attention."""
        x = x + self.dropout(attended)
        if self.post:
            x = self.attention_norm(x)
            return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        key_sum: Tensor,
        implementation: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read ``x [B, T, D]``; also returns this layer's memory after it."""
        attended, weights, key_sum = self.attention(
            self.before_attention(x), weights, key_sum, implementation
        )
        return self.after_attention(x, attended), weights, key_sum


class FastWeights(Backbone[FastWeightsMemory]):
    """The stack over vectors: ``[B, T, D]`` and a memory in, ``[B, T, D]`` and a memory out.

    Reading does not depend on how a text is cut. Nothing here stops the gradient at the memory:
    whoever trains calls ``memory.detach()`` between segments.
    """

    feature_id: Tensor

    memory_type = FastWeightsMemory
    implementations = tuple(IMPLEMENTATIONS)
    config: FastWeightsConfig

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__()
        refuse_oversized_model(config)
        _refuse_oversized_features(config)
        self.config = config
        self.dropout = dropout_layer(config.dropout)
        self.layers = nn.ModuleList(FastWeightsLayer(config) for _ in range(config.n_layers))
        normalises = config.final_norm and config.norm != "post"
        self.final_norm = nn.LayerNorm(config.d_model) if normalises else nn.Identity()
        self.register_buffer("feature_id", self._feature_id(self._draws()))
        initialise(self, config.initialisation, config.n_layers, FACTORS)

    def stack(self) -> Iterator[FastWeightsLayer]:
        """The layers, first to last, under their own type."""
        return iter(self.layers)  # type: ignore[arg-type]

    def redraw_features(self) -> None:
        """New random projections for favor; memories written so far are of another map then."""
        draws = []
        for layer in self.stack():
            old = layer.attention.projection
            draws.append(layer.attention.drawn().to(old.dtype))
            # A new tensor: the old one may be part of a graph that is still to go backward.
            layer.attention.projection = draws[-1].to(old.device)
        self.feature_id = self._feature_id(draws).to(self.feature_id)

    def weights_replaced(self) -> None:
        """Identify the feature map again: its random projections may be another run's."""
        self.feature_id = self._feature_id(self._draws()).to(self.feature_id)

    def _draws(self) -> list[Tensor]:
        """The random projections of all layers; of none without favor."""
        if self.config.feature_map != "favor":
            return []
        return [layer.attention.projection for layer in self.stack()]

    def _feature_id(self, draws: list[Tensor]) -> Tensor:
        config = self.config
        options = (config.feature_map, config.nu, config.feature_width, config.normalisation)
        number = zlib.crc32(repr(options).encode())
        if draws and not draws[0].is_meta:  # a model of shapes alone has drawn nothing
            number = zlib.crc32(torch.stack(draws).float().cpu().numpy().tobytes(), number)
        # Zero is for rows that are empty.
        return torch.tensor(number + 1)

    def initial_memory(self, batch_size: int) -> FastWeightsMemory:
        """A memory before the first token, in float32 or better."""
        config, parameter = self.config, next(self.parameters())
        device = parameter.device
        heads = (batch_size, config.n_layers, config.n_heads)
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        z_width = config.feature_width if config.normalisation == "attention" else 0
        return FastWeightsMemory(
            tokens_seen=torch.zeros(batch_size, dtype=torch.long, device=device),
            weights=torch.zeros(
                *heads, config.feature_width, config.head_width, dtype=dtype, device=device
            ),
            key_sum=torch.zeros(*heads, z_width, dtype=dtype, device=device),
            feature_map=torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def forward(
        self,
        x: Tensor,
        memory: FastWeightsMemory | None = None,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> BackboneOutput[FastWeightsMemory]:
        """Read a segment.

        Args:
            x: ``[B, T, D]``.
            memory: what was read before (None: nothing). It is not changed.
            starts: bool ``[B, T]``, true where a document begins: nothing before it is visible from
                there on (None: no document begins in this segment).
            lengths: int64 ``[B]``, each row's number of tokens; the rest is padding, which changes
                nothing (None: no padding).
            padding: the side that padding is on.
            implementation: of :func:`memspan.ops.delta_rule.rules.delta_rule`; the outer-product rule
                has the reference only. None: the fastest that can run here.

        Raises:
            MemspanError: the memory is of another size or feature map, or the implementation cannot
                run. What is not finite, or overflows in here, comes out as NaN in its row, and is no
                error: where processes share the model, none may leave a pass before the others.
                Readers do refuse it. A row that another feature map wrote comes out as NaN, too,
                where looking would wait for the device or break a compiled graph.
        """
        self._check_implementation(implementation)
        if memory is None:
            memory = self.initial_memory(x.shape[0])
        self.check_memory(memory, x.shape[0])
        if self.training and self.config.favor_redraw:
            self.redraw_features()
            memory = self.initial_memory(x.shape[0])
        elif can_look(memory.feature_map):
            self.check_feature_map(memory)
        else:
            x = x.masked_fill(self._foreign(memory)[:, None, None], math.nan)
        if not x.shape[1]:
            return BackboneOutput(self.final_norm(x), memory, x.new_zeros(()))
        read = partial(self._read, implementation=implementation)
        if starts is None and lengths is None:
            return read(x, memory)
        return read_in_pieces(read, x, memory, starts, lengths, padding)

    def _check_implementation(self, name: str | None) -> None:
        refuse_unknown_implementation(name, self.implementations)
        if self.config.rule == "outer-product" and name not in (None, "reference"):
            raise MemspanError(
                f"the outer-product rule has no {name} implementation: use the reference"
            )

    def _read(
        self, x: Tensor, memory: FastWeightsMemory, implementation: str | None
    ) -> BackboneOutput[FastWeightsMemory]:
        """A segment that belongs to one document in each row."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        h = self.dropout(self.add_positions(x, memory.tokens_seen))
        weights, key_sums = [], []
        before = zip(memory.weights.unbind(1), memory.key_sum.unbind(1), strict=True)
        for layer, (old, old_sum) in zip(self.stack(), before, strict=True):
            h, after, key_sum = layer(h, old.to(dtype), old_sum.to(dtype), implementation)
            weights.append(after)
            key_sums.append(key_sum)
        return BackboneOutput(
            self.final_norm(h),
            FastWeightsMemory(
                tokens_seen=memory.tokens_seen + x.shape[1],
                weights=torch.stack(weights, 1),
                key_sum=torch.stack(key_sums, 1),
                feature_map=self.feature_id.expand(x.shape[0]).clone(),
            ),
            h.new_zeros(()),
        )

    @torch.no_grad()
    def write_retention(self, x: Tensor, memory: FastWeightsMemory) -> WriteRetention | None:
        """See :meth:`Backbone.write_retention`; None with the outer-product rule, which has no keys."""
        config = self.config
        if config.rule == "outer-product":
            return None
        h = self.add_positions(x, memory.tokens_seen)
        kept, ranks = [], []
        for n, layer in enumerate(self.stack()):
            before = layer.before_attention(h)
            kept.append(layer.attention.kept(before, memory.key_sum[:, n]).mean((0, 1)))
            h, weights, _ = layer(h, memory.weights[:, n], memory.key_sum[:, n])
            values = torch.linalg.svdvals(weights)
            share = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
            ranks.append(torch.special.entr(share).sum(-1).exp().mean())
        return WriteRetention(
            torch.stack(kept), torch.stack(ranks), min(config.feature_width, config.head_width)
        )

    def reader(
        self, memory: FastWeightsMemory | None, batch_size: int
    ) -> BackboneReader[FastWeightsMemory]:
        """Reads on without gradients: constant memory and time per token."""
        from memspan.models.fast_weights.reader import FastWeightsReader

        return FastWeightsReader(self, memory or self.initial_memory(batch_size))

    def compiled_loops(self) -> bool:
        """Whether the loop over tokens can run in C here."""
        return delta_rule_loop.available(next(self.parameters()))

    def float32_part(self) -> str:
        """What is computed in float32 even under bfloat16 autocast."""
        return "fast weights are written and read"

    def add_positions(self, x: Tensor, tokens_seen: Tensor) -> Tensor:
        """``x [B, T, D]`` with the sinusoids of its positions, where the option asks for them."""
        if self.config.positions == "none":
            return x
        positions = tokens_seen[:, None] + torch.arange(x.shape[1], device=x.device)
        codes = sinusoids(positions.flatten(), x.shape[-1], x.dtype)
        return x + codes.view(*positions.shape, x.shape[-1])

    def check_memory(self, memory: FastWeightsMemory, rows: int) -> None:
        """Refuse a memory of another size."""
        config = self.config
        found = tuple(memory.weights.shape)
        wanted = (rows, config.n_layers, config.n_heads, config.feature_width, config.head_width)
        z_width = config.feature_width if config.normalisation == "attention" else 0
        if found != wanted or memory.key_sum.shape != (*wanted[:3], z_width):
            raise MemspanError(
                f"the memory is for (rows, layers, heads, features, values) {found} with "
                f"{memory.key_sum.shape[-1]} key sums, and this model needs {wanted} with "
                f"{z_width}: use memory.select for rows, or this model's initial_memory"
            )

    def _foreign(self, memory: FastWeightsMemory) -> Tensor:
        """Bool ``[B]``: rows that another feature map wrote."""
        written = memory.feature_map
        return (written != 0) & (written != self.feature_id)

    def check_feature_map(self, memory: FastWeightsMemory) -> None:
        """Refuse a memory that another feature map wrote. Waits for the device."""
        other = self._foreign(memory)
        if other.any():
            raise MemspanError(
                f"rows {listed(other)} of the memory were written with another feature map than "
                f"this model's {self.config.feature_map}, or other options or another draw of it: "
                "reset those rows, or use the model that wrote them"
            )


def can_look(x: Tensor) -> bool:
    """Whether a value may decide what Python does next: at once, and outside of any graph."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def listed(mask: Tensor) -> str:
    """The numbers of the rows where ``mask [B]`` is true, eight at most, for people."""
    rows: list[int] = mask.nonzero().flatten().tolist()
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def _refuse_oversized_features(config: FastWeightsConfig) -> None:
    """Refuse what one row's memory, its successor and random projections would take."""
    per_row = config.n_layers * config.n_heads * config.feature_width * (config.head_width + 1)
    needed = 2 * BYTES * per_row
    if config.feature_map == "favor":
        needed += BYTES * config.n_layers * config.head_width * config.n_projections
    refuse_oversized(
        f"a memory with {config.feature_width:,} features per key",
        needed,
        torch.get_default_device(),
        "lower nu, favor_features, d_head or n_layers",
    )
