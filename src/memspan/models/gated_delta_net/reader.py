"""The reader of Gated DeltaNet, which updates its memory in place."""

from __future__ import annotations

import torch
from torch import Tensor

from memspan.models.gated_delta_net.layer import PRODUCTS, GatedDeltaRule
from memspan.models.gated_delta_net.model import GatedDeltaNet, GatedDeltaNetMemory
from memspan.models.in_place import InPlaceReader, refuse_non_finite
from memspan.models.matrix.mixer import EPSILON, MatrixLayerMemory
from memspan.models.one_token import StepsInC, packed_stack
from memspan.ops.fast_weights import compiled as delta_rule_loop
from memspan.ops.fast_weights.one_token import CompiledGatedStep


class GatedDeltaNetReader(InPlaceReader[GatedDeltaNetMemory], StepsInC[CompiledGatedStep]):
    """Reads a stream without gradients. A single token takes one call to the step in C where that can
    run, otherwise a pass of the layers."""

    def __init__(self, backbone: GatedDeltaNet, memory: GatedDeltaNetMemory) -> None:
        super().__init__(backbone, memory, ("weights", "inputs"))
        self.backbone = backbone

    def _compiles(self, bf16_weights: bool) -> bool:
        return delta_rule_loop.available(self._layers["weights"][0], bf16_weights)

    def _compiled_step(self, bf16_weights: bool) -> CompiledGatedStep:
        config = self.backbone.config
        mixers: list[GatedDeltaRule] = [layer.mixer for layer in self.backbone.stack()]  # type: ignore[misc]
        stack = packed_stack(
            delta_rule_loop.SOURCE,
            self.backbone.stack(),
            [
                {"projections": torch.cat([getattr(part, name).weight for name in PRODUCTS])}
                for part in mixers
            ],
            self.backbone.final_norm,
            n_heads=config.value_heads,
            batch=self._rows.count,
            mixer="mixer",
            bf16_weights=bf16_weights,
        )
        memories = zip(mixers, self._layers["weights"], self._layers["inputs"], strict=True)
        layers = [
            {
                "convolution": part.convolution.detach().T.contiguous(),
                "rate": -part.rate(part.A_log.dtype).detach(),
                "step_bias": part.dt_bias.detach().contiguous(),
                "gain": part.norm.weight.detach().contiguous(),
                "memory": weights,
                "inputs": inputs,
            }
            for part, weights, inputs in memories
        ]
        largest = 2.0 if config.negative_eigenvalues else 1.0
        return CompiledGatedStep(
            stack, layers, key_heads=config.n_heads, beta=largest, epsilon=EPSILON
        )

    def _read(self, x: Tensor) -> Tensor:
        self._n_read += x.shape[1]
        step = self._step_for(x, self._dtype) if x.shape[1] == 1 else None
        if step is not None:
            # A copy, since it is overwritten.
            h = x.detach().clone(memory_format=torch.contiguous_format)
            step.read(h)
        else:
            h = x
            memories = map(MatrixLayerMemory, self._layers["weights"], self._layers["inputs"])
            for layer, own in zip(self.backbone.stack(), memories, strict=True):
                h, after = layer(h, own)
                own.weights.copy_(after.weights)
                own.inputs.copy_(after.inputs)
            h = self.backbone.final_norm(h)
        refuse_non_finite(h)
        return h
