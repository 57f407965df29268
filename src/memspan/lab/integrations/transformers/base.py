"""Base of our models in transformers: weights, reading, embeddings."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from memspan.errors import MemspanError
from memspan.lab.integrations.transformers.cache import MemspanCache
from memspan.lab.integrations.transformers.config import MemspanConfig
from memspan.models import LanguageModel
from memspan.models.inputs import check_tokens

CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The cache's name in the installed version of transformers, which renamed it in 5.24."""


def both_names(output: type) -> type:
    """Decorate a class of outputs: in every version ``past_key_values`` is ``cache``."""
    other = "past_key_values" if CACHE == "cache" else "cache"
    setattr(output, other, property(lambda self: getattr(self, CACHE)))
    return output


class MemspanPreTrainedModel(PreTrainedModel):
    """A :class:`memspan.LanguageModel` as ``self.model``, read as transformers reads.

    Args:
        config: its options.

    Raises:
        MemspanError: the options are invalid.
    """

    config_class = MemspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Generation must neither go back nor spread the model over devices.
    _is_stateful = True
    _no_split_modules = ("LanguageModel",)

    def __init__(self, config: MemspanConfig) -> None:
        super().__init__(config)
        backbone, embedding = config.parts()
        self.model = LanguageModel(config.vocab_size, backbone, embedding)
        self._tied_weights_keys = _tied(self)
        self._from_files = next(self.parameters()).is_meta
        longest = backbone.longest_segment or config.segment_length
        self._segment_length = min(config.segment_length, longest)

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """As :meth:`transformers.PreTrainedModel.from_pretrained`.

        Raises:
            MemspanError: a tensor is missing, or not finite.
        """
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, tensor in model.named_parameters():
            if not tensor.is_meta and not tensor.isfinite().all():
                raise MemspanError(
                    f"the weights are damaged: {name} has values that are not finite; export the run "
                    "again"
                )
        return loaded

    def _read_on(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: MemspanCache,
        targets: Tensor | None = None,
        to_keep: int = 0,
        head: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, T, V]``, or hidden states ``[B, T, D]`` without ``head``; the mean auxiliary
        loss; and where tokens are not padding, bool ``[B, T]`` (None: all)."""
        check_tokens(cast(Tensor, input_ids), targets)
        assert input_ids is not None
        own = self._own(input_ids, attention_mask, cache.get_seq_length())
        cache.bind(self.model, len(input_ids))
        if own is None:
            y, auxiliary_loss = self._read(input_ids, None, cache, to_keep, head)
        else:
            y, auxiliary_loss = self._read_padded(input_ids, own, cache, to_keep, head)
        if input_ids.numel():
            cache.count(input_ids.shape[1], y[:, -1] if head else None)
        if targets is None and self.training and auxiliary_loss.requires_grad:
            warnings.warn(
                f"{type(self.model.backbone).__name__} has an auxiliary loss, which only the model's "
                "own loss contains: give it labels, or a part of it is not trained",
                stacklevel=4,
            )
        return y, auxiliary_loss, own

    def _own(
        self, input_ids: Tensor, attention_mask: Tensor | None, n_before: int
    ) -> Tensor | None:
        """Bool ``[B, T]``, false at padding; None without any."""
        own = torch.ones_like(input_ids, dtype=torch.bool)
        if self.config.padding_id is not None:
            own = input_ids != self.config.padding_id
        if attention_mask is not None:
            rows, n_columns = input_ids.shape
            if attention_mask.shape not in ((rows, n_columns), (rows, n_before + n_columns)):
                raise MemspanError(
                    f"attention_mask must have {rows} rows and cover the {n_columns} new columns, or "
                    f"all {n_before + n_columns}: it is {list(attention_mask.shape)}"
                )
            own = own & (attention_mask[:, attention_mask.shape[1] - n_columns :] != 0)
        return None if own.all() else own

    def _read_padded(
        self, tokens: Tensor, own: Tensor, cache: MemspanCache, to_keep: int, head: bool
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`_read`; padding is where ``own [B, T]`` is false, and has the logits before it."""
        before = cache.last_logits if head else None
        # All padding to the right, which keeps the order of a row's own tokens.
        order = (~own).to(torch.uint8).argsort(dim=1, stable=True)
        moved = tokens.masked_fill(~own, 0).gather(1, order)
        latest = own.cumsum(1)[:, -to_keep:, None]
        # Earlier logits are not kept: those of a long prompt take gigabytes.
        unwanted = max(int(latest.min()) - 1, 0)
        y, auxiliary_loss = self._read(moved, own.sum(1), cache, tokens.shape[1] - unwanted, head)
        if before is None:
            before = torch.zeros_like(y[:, 0])
        y = torch.cat([before[:, None], y], 1)
        return y.gather(1, (latest - unwanted).expand(-1, -1, y.shape[2])), auxiliary_loss

    def _read(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        cache: MemspanCache,
        to_keep: int,
        head: bool,
    ) -> tuple[Tensor, Tensor]:
        """Logits or hidden states of the last ``to_keep`` columns (0: all) of tokens with padding on
        the right, and the mean auxiliary loss of the segments."""
        model, n_columns = self.model, tokens.shape[1]
        # Without padding and gradients: keys and values of memory are then projected once.
        as_reader = head and lengths is None and not self.training and not torch.is_grad_enabled()
        kept: list[Tensor] = []
        auxiliary_losses = [tokens.new_zeros((), dtype=self.dtype)] if as_reader else []
        for start in range(0, max(n_columns, 1), self._segment_length):
            segment = tokens[:, start : start + self._segment_length]
            n_own = None if lengths is None else (lengths - start).clamp(0, segment.shape[1])
            if as_reader:
                y = cache.read(segment)
            else:
                if head:
                    output = model(segment, cache.memory, lengths=n_own)
                    y = output.logits
                else:
                    output = model.backbone(model._embed(segment), cache.memory, lengths=n_own)
                    y = model.output_dropout(output.hidden)
                cache.memory = output.memory
                auxiliary_losses.append(output.auxiliary_loss)
            if start + segment.shape[1] > (n_columns - to_keep if to_keep else -1):
                kept.append(y)
        return torch.cat(kept, 1)[:, -to_keep:], torch.stack(auxiliary_losses).mean()

    def _init_weights(self, module: nn.Module) -> None:
        """The model has initialised itself, unless it was made to be filled from files.

        Raises:
            MemspanError: a tensor is missing in those files.
        """
        if module is getattr(self, "score", None):
            # As in other models.
            nn.init.normal_(module.weight, std=0.02)
            return
        if not self._from_files:
            return
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            # Without files, too, a model may be made without memory for its weights.
            if tensor is not None and not (
                tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)
            ):
                raise MemspanError(
                    f"the weights lack {name} of a {type(module).__name__}: they are damaged, or of "
                    "another config.json"
                )

    @property
    def gradient_checkpointing(self) -> bool:
        """Set by ``gradient_checkpointing_enable``, whose own options have no effect: see
        :attr:`memspan.LanguageModel.recompute`."""
        return self.model.recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        self.model.recompute = wanted

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """The output head, whose ``weight`` and ``bias`` make logits of hidden states; None for an
        adaptive softmax, which is not one matrix."""
        head = self.model.head
        return head if len(head.edges) == 2 else None

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the vocabulary, see :meth:`memspan.LanguageModel.resize_token_embeddings`.

        A padding id that lies within the new vocabulary is one of its tokens from then on: padding is
        where the attention mask says so.

        Args:
            new_num_tokens: the new number of token ids (None: as many as there are).
            pad_to_multiple_of: rounds that up (None: it is taken as it is).
            mean_resizing: new rows are always the mean of the others.

        Returns:
            The token embedding.

        Raises:
            MemspanError: the vocabulary cannot have that size.
        """
        size = self.model.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        self.model.resize_token_embeddings(size)
        self.config.vocab_size = size
        padding = self.config.padding_id
        if padding is not None and 0 <= padding < size:
            self.config.padding_id = None
        return self.model.embedding


def chosen_cache(cache: object, past_key_values: object = None) -> MemspanCache:
    """The cache, given by either name; a new one if there is none."""
    if None not in (cache, past_key_values) and cache is not past_key_values:
        raise MemspanError("cache and past_key_values are two names of one cache: give one of them")
    given = past_key_values if cache is None else cache
    if given is None:
        return MemspanCache()
    if not isinstance(given, MemspanCache):
        raise MemspanError(
            f"the cache must be a MemspanCache, not a {type(given).__name__}: begin with "
            "MemspanCache(), or with a memory as MemspanCache(memory)"
        )
    return given


def _tied(model: nn.Module) -> dict[str, str]:
    """Maps the names of tied tensors, each as a pattern, to the first name of the same tensor."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(id(tensor), name)
        if source != name:
            tied[f"{re.escape(name)}$"] = f"{re.escape(source)}$"
    return tied
