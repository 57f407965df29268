"""The base class of readers of stacks with matrix memories, which update them in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from memspan.models.in_place import InPlaceReader, refuse_non_finite
from memspan.models.matrix.backbone import MatrixBackbone, MatrixMemory
from memspan.models.matrix.mixer import EPSILON, LowRank, MatrixLayerMemory, finite_exp
from memspan.models.one_token import StepsInC, packed_stack
from memspan.ops.delta_rules import compiled
from memspan.ops.delta_rules.one_token import LARGEST_WRITES, CompiledStep, TokenOptions

M = TypeVar("M", bound=MatrixMemory)


class Token(NamedTuple):
    """One layer's way to read a single token, as :class:`CompiledStep` takes it."""

    products: Sequence[nn.Module]
    """Products of the input, in its order: ``nn.Linear`` or :class:`LowRank`."""
    tensors: dict[str, Tensor]
    """Its layers' tensors, but for the memory."""
    options: dict[str, Any]
    """Options that are not the same for all architectures."""


class MatrixReader(InPlaceReader[M], StepsInC[CompiledStep]):
    """Reads a stream without gradients. A single token takes one call to the step in C where that can
    run, otherwise a pass of the layers."""

    def __init__(self, backbone: MatrixBackbone[M], memory: M) -> None:
        super().__init__(backbone, memory, ("weights", "inputs"))
        self.backbone = backbone

    @abstractmethod
    def token(self, mixer: Any) -> Token:
        """Make the step that reads a single token in a layer with this mixer."""

    def _compiles(self, bf16_weights: bool) -> bool:
        writes = getattr(self.backbone.config, "n_householder", 1)
        available = compiled.available(self._layers["weights"][0], bf16_weights)
        return available and writes <= LARGEST_WRITES

    def _compiled_step(self, bf16_weights: bool) -> CompiledStep:
        tokens = [self.token(layer.mixer) for layer in self.backbone.stack()]
        heads, width, value_width = self.backbone.config.matrices
        stack = packed_stack(
            compiled.SOURCE,
            self.backbone.stack(),
            [_joined(token.products) for token in tokens],
            self.backbone.final_norm,
            n_heads=heads,
            batch=self._rows.count,
            mixer="mixer",
            bf16_weights=bf16_weights,
        )
        memories = zip(tokens, self._layers["weights"], self._layers["inputs"], strict=True)
        layers = [
            {name: t.detach().contiguous() for name, t in token.tensors.items()}
            | {"memory": weights, "inputs": inputs}
            for token, weights, inputs in memories
        ]
        alike = {
            "key_heads": heads,
            "key_width": width,
            "taps": self._layers["inputs"][0].shape[1] + 1,
            "normed": value_width,
            "n_gains": value_width,
            "epsilon": EPSILON,
        }
        return CompiledStep(stack, layers, TokenOptions(**alike | tokens[0].options))

    def _read(self, x: Tensor) -> Tensor:
        self._n_read += x.shape[1]
        step = self._step_for(x, self._dtype) if x.shape[1] == 1 else None
        if step is not None:
            # A copy, since it is overwritten.
            h = x.detach().clone(memory_format=torch.contiguous_format)
            step.read(h)
        else:
            memories = list(map(MatrixLayerMemory, self._layers["weights"], self._layers["inputs"]))
            h, after = self.backbone.read_layers(x, memories, None, None)
            for own, new in zip(memories, after, strict=True):
                own.weights.copy_(new.weights)
                own.inputs.copy_(new.inputs)
            h = self.backbone.final_norm(h)
        refuse_non_finite(h)
        return h


def decays(mixer: Any) -> dict[str, Tensor]:
    """Tensors of ``exp(-exp(A_log) softplus(step + dt_bias))``."""
    return {"rate": -finite_exp(mixer.A_log, mixer.A_log.dtype), "step_bias": mixer.dt_bias}


def delta_tensors(mixer: Any) -> dict[str, Tensor]:
    """Tensors of a delta rule's layer beside its decays."""
    return {"convolution": mixer.convolution.T, "gain": mixer.norm.weight}


def delta_options(config: Any) -> dict[str, Any]:
    """Options of a delta rule, whose queries and keys have length 1."""
    return {
        "unit": True,
        "query_scale": config.head_width**-0.5,
        "largest": 2.0 if config.negative_eigenvalues else 1.0,
    }


def _joined(products: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The weights side by side, and biases, if any product has one. A product of low rank counts as the
    one that it equals."""
    pairs = [_product(part) for part in products]
    joined = {"projections": torch.cat([weight for weight, _ in pairs])}
    if any(bias is not None for _, bias in pairs):
        joined["projections_bias"] = torch.cat(
            [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs]
        )
    return joined


def _product(part: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(part, LowRank):
        weight = part.up.weight.double() @ part.down.weight.double()
        return weight.to(part.up.weight.dtype), part.up.bias
    return part.weight, part.bias
