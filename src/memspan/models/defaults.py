"""Defaults of what the trainer, measurements and other architectures ask of a backbone.

An own architecture may leave all of it as it is, and still trains, evaluates and generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from torch import Tensor, nn

from memspan.errors import MemspanError
from memspan.memory import Memory

if TYPE_CHECKING:
    from memspan.models.protocol import Backbone

M = TypeVar("M", bound=Memory)


@dataclass(frozen=True)
class TransferableWeights:
    """Weights that another architecture can take from one of softmax attention, by neutral names."""

    n_heads: int
    head_width: int
    layers: list[dict[str, Tensor]]
    """For each layer ``query.weight``, ``key.weight``, ``value.weight``, ``output.weight`` and their
    biases; ``feed_forward.inner.*``, ``feed_forward.outer.*``, ``attention_norm.*`` and
    ``feed_forward_norm.*``. The score of a key at the n-th distance asked for is
    ``(q + content_bias) . k + q . position_keys[n] + position_scores[n]``, with
    ``content_bias [H, K]``, ``position_keys [P, H, K]``, ``position_scores [P, H]``."""
    final_norm: Mapping[str, Tensor]
    """``weight`` and ``bias`` of the norm after the last layer, if there is one."""


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of a segment's tokens, layer by layer."""

    layers: list[Tensor]
    """One per layer, ``[B, H, T, S]``: a token's weights sum to 1, or to 0 where it sees nothing."""
    distances: Tensor
    """Tokens from each token back to what a key stands for, float ``[B or 1, T or 1, S]``."""
    kinds: dict[str, Tensor]
    """Parts of the memory, and the segment where it is apart: which keys belong to each, bool
    ``[B or 1, S]``."""


@dataclass(frozen=True)
class WriteRetention:
    """Fate of the values that are written to matrices."""

    kept: Tensor
    """The share of the first token's value that its key reads after 0, 1, 2, ... further tokens,
    ``[L, T]``: mean over rows and heads."""
    effective_rank: Tensor
    """``[L]``: the exponential of the entropy of the matrices' singular values after the last token
    (Roy and Vetterli 2007), mean over rows and heads."""
    full_rank: int
    """The largest rank that it can have."""


def not_replicated(module: nn.Module) -> NoReturn:
    """Takes the place of ``_replicate_for_data_parallel``: the copies of ``nn.DataParallel`` have no
    parameters, and it can neither scatter a memory nor gather an output.

    Raises:
        MemspanError: says what to use instead.
    """
    raise MemspanError(
        "nn.DataParallel cannot carry a memory: use torch.nn.parallel.DistributedDataParallel, in a "
        "process for each GPU, or memspan train --nproc"
    )


class Defaults(nn.Module, Generic[M]):
    """Answers of an architecture that has nothing of its own to say."""

    layers: nn.ModuleList
    tables: tuple[str, ...] = ()
    """Last parts of the names of parameters with one row per distance, nearest first. A longer table
    means the same in its first rows."""
    _replicate_for_data_parallel = not_replicated

    # ----- Reading and training

    def longest_segment(self, memory: M, **options: Any) -> int | None:
        """The most tokens that can be read at once after ``memory`` (None: any number). The options
        are those of :meth:`reader`."""
        return None

    def context(self, segment_length: int, **options: Any) -> tuple[int, int] | None:
        """Number of earlier tokens that a token sees, away from the text's beginning, least and most,
        where the options are those of :meth:`reader` (None: as far as the memory reaches)."""
        return None

    def units(self) -> list[nn.Module]:
        """Modules whose parameters are used in their own forward pass and nowhere else, so that
        processes that share the parameters may gather them for it and drop them again."""
        return list(self.layers)

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the auxiliary loss trains: clipped apart, with their own rate."""
        return []

    def float32_part(self) -> str | None:
        """Name the part computed in float32 even under autocast: a clause (None: none that counts)."""
        return None

    def compiled_loops(self) -> bool | None:
        """Check that this architecture's loops in C can run here (None: it has none)."""
        return None

    # ----- Looking inside

    def attention_weights(self, x: Tensor, memory: M) -> AttentionWeights | None:
        """Attention weights of a segment ``x [B, T, D]``, by the reference implementation,
        without gradients (None: there is no attention to look at)."""
        return None

    def write_retention(self, x: Tensor, memory: M) -> WriteRetention | None:
        """Measure how long writes of ``x [B, T, D]`` can be read back, without gradients (None: nothing
        is written to matrices)."""
        return None

    # ----- Weights and memories from elsewhere

    def load_memory(self, path: Path | IO[bytes], fingerprint: str, like: Memory) -> Memory:
        """Load a file of ``memory.save(path, fingerprint)``. ``like``: an empty memory of this
        backbone, without rows where the file may have any number."""
        return type(like).load(path, fingerprint, like=like)

    def transferable_weights(self, distances: Tensor) -> TransferableWeights | None:
        """Weights that another architecture can take (None: none mean the same elsewhere).

        ``distances``: int64 ``[P]``, those whose position terms are wanted, ascending. Of a learned
        table only its rows among them are returned.
        """
        return None

    def taken_from(self, source: Backbone[Memory]) -> dict[str, Tensor] | None:
        """Tensors by this backbone's names, from another architecture's ``source`` of the same width.

        None: there is nothing to take.

        Raises:
            MemspanError: other heads, where the heads' weights are taken.
        """
        return None
