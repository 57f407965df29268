"""A carried memory in Lightning: a resumed training is the one that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memspan.models import LanguageModel, TransformerXLConfig
from memspan.models.transformer_xl.model import TransformerXLMemory

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning")
SEGMENTS = 6


class Segments:
    """Segments of two texts, in order. Lightning keeps the position in its checkpoints."""

    def __init__(self) -> None:
        texts = torch.randint(64, (2, SEGMENTS * 8 + 1), generator=torch.Generator().manual_seed(1))
        self.inputs = texts[:, :-1].split(8, 1)
        self.targets = texts[:, 1:].split(8, 1)
        self.position = 0

    def __len__(self) -> int:
        return SEGMENTS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < SEGMENTS:
            self.position += 1
            yield self.inputs[self.position - 1], self.targets[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Reading(lightning.LightningModule):
    """The module of the guide."""

    def __init__(self) -> None:
        super().__init__()
        config = TransformerXLConfig(
            n_layers=1, d_model=16, n_heads=2, d_ff=16, memory_length=8, dropout=0.1
        )
        self.model = LanguageModel(64, config)
        self.memory: TransformerXLMemory | None = None
        self.random: Tensor | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, targets = batch
        output = self.model(tokens, self.memory, targets=targets)
        self.memory = output.memory.detach()
        return output.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["memory"] = self.memory
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.memory = checkpoint["memory"]
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if self.random is not None:
            torch.set_rng_state(self.random)


def trained(folder: Path, steps: int, resume: Path | None = None) -> Reading:
    torch.manual_seed(0)
    reading = Reading()
    training = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training.fit(reading, Segments(), ckpt_path=resume)
    training.save_checkpoint(folder / f"{steps}.ckpt")
    return reading


@pytest.mark.parametrize("steps", [4, SEGMENTS, 8])
def test_a_resumed_training_ends_with_the_same_weights(steps: int, tmp_path: Path) -> None:
    """From within the first text, after it, and within its second reading; with dropout."""
    whole = trained(tmp_path, 2 * steps)
    trained(tmp_path, steps)
    resumed = trained(tmp_path, 2 * steps, tmp_path / f"{steps}.ckpt")
    for name, weight in whole.named_parameters():
        assert weight.equal(resumed.get_parameter(name)), name
    assert whole.memory is not None
    assert resumed.memory is not None
    for name, tensor in whole.memory.tensors().items():
        assert tensor.equal(resumed.memory.tensors()[name]), name
