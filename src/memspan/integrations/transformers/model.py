"""A language model with a memory as a model of transformers: only the interface, no arithmetic."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from memspan.errors import MemspanError
from memspan.integrations.transformers.cache import MemspanCache
from memspan.integrations.transformers.config import MemspanConfig
from memspan.models import LanguageModel
from memspan.models.inputs import check_tokens, outside
from memspan.nn import NOT_SCORED

CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The cache's name in the installed version of transformers, which renamed it in 5.24."""


@dataclass
class MemspanOutput(CausalLMOutputWithPast):
    """``loss``, ``logits`` and the cache, as ``cache`` and as ``past_key_values`` in every version."""


setattr(
    MemspanOutput,
    "past_key_values" if CACHE == "cache" else "cache",
    property(lambda output: getattr(output, CACHE)),
)


class MemspanForCausalLM(PreTrainedModel, GenerationMixin):
    """Any architecture of memspan, with the methods of transformers' models: ``generate``,
    ``save_pretrained`` and the others.

    ``self.model`` is the :class:`memspan.LanguageModel`. Instead of caching keys and values, it has a
    memory of constant size, see :class:`MemspanCache`.

    Args:
        config: its options.

    Raises:
        MemspanError: the options are invalid.
    """

    config_class = MemspanConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
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
        self.generation_config.pad_token_id = config.padding_id
        self.post_init()

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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: MemspanCache | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: MemspanCache | None = None,
        **kwargs: Any,
    ) -> MemspanOutput:
        """Read on. The names and number of parameters are transformers'.

        Args:
            input_ids: int64 ``[B, T]``, what is new.
            attention_mask: ``[B, P + T]`` or ``[B, T]``, 0 where a token is padding, which is skipped
                wherever it stands (None: no padding). P: columns that the cache has read.
            cache: what was read before, which moves on (None: nothing).
            labels: int64 ``[B, T]``, the same as ``input_ids``; the loss is that of predicting each
                from what is before it. A label of -100 is not scored.
            num_items_in_batch: scored tokens of all batches of an update (None: of this one).
            use_cache: False returns no cache.
            logits_to_keep: columns, from the right, whose logits are wanted (0: all).
            inputs_embeds: refused, since memory is made of tokens.
            output_attentions: refused.
            output_hidden_states: refused.
            past_key_values: the name of ``cache`` before transformers 5.24.
            kwargs: ``shift_labels``, which are labels, but each in the column before, where it is
                predicted: needed to score the first token of each segment of a stream. As in other
                models it is not in the signature, where the trainer would ask for both kinds.

        Returns:
            ``loss``, where there are labels: mean nats per token, and in training the architecture's
            auxiliary loss. ``logits [B, T, V]``; at padding those after the row's last token.
            ``cache``, also as ``past_key_values``.

        Raises:
            MemspanError: an argument is not as described here.
        """
        if inputs_embeds is not None or output_attentions or output_hidden_states:
            raise MemspanError(
                "inputs_embeds, output_attentions and output_hidden_states are not for this model: "
                "leave them out and give input_ids"
            )
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise MemspanError(
                f"logits_to_keep must be a number of columns, 0 for all, not {logits_to_keep!r}"
            )
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        if unknown := [name for name, value in kwargs.items() if value is not None]:
            raise MemspanError(
                f"{', '.join(unknown)}: this model takes no such argument, leave it out"
            )
        targets = labels if shift_labels is None else shift_labels
        check_tokens(cast(Tensor, input_ids), targets)
        assert input_ids is not None
        cache = _cache(cache, past_key_values)
        own = self._own(input_ids, attention_mask, cache.get_seq_length())
        cache.bind(self.model, len(input_ids))
        if own is None:
            logits, auxiliary_loss = self._read(input_ids, None, cache, logits_to_keep)
        else:
            logits, auxiliary_loss = self._read_padded(input_ids, own, cache, logits_to_keep)
        if input_ids.numel():
            cache.count(input_ids.shape[1], logits[:, -1])
        loss = None
        if targets is not None:
            if shift_labels is None:
                # Each in the column before its own.
                labels = targets if own is None else targets.masked_fill(~own, NOT_SCORED)
                targets = F.pad(labels[:, 1:], (0, 1), value=NOT_SCORED)
            if own is not None:
                targets = targets.masked_fill(~own, NOT_SCORED)
            loss = self._loss(logits, targets, auxiliary_loss, num_items_in_batch)
        returned = None if use_cache is False else cache
        return MemspanOutput(loss=loss, logits=logits, **{CACHE: returned})

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
        self, tokens: Tensor, own: Tensor, cache: MemspanCache, to_keep: int
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`_read`; padding is where ``own [B, T]`` is false, and has the logits before it."""
        before = cache.last_logits
        # All padding to the right, which keeps the order of a row's own tokens.
        order = (~own).to(torch.uint8).argsort(dim=1, stable=True)
        moved = tokens.masked_fill(~own, 0).gather(1, order)
        latest = own.cumsum(1)[:, -to_keep:, None]
        # Earlier logits are not kept: those of a long prompt take gigabytes.
        unwanted = max(int(latest.min()) - 1, 0)
        logits, auxiliary_loss = self._read(moved, own.sum(1), cache, tokens.shape[1] - unwanted)
        if before is None:
            before = torch.zeros_like(logits[:, 0])
        logits = torch.cat([before[:, None], logits], 1)
        return logits.gather(1, (latest - unwanted).expand(-1, -1, logits.shape[2])), auxiliary_loss

    def _read(
        self, tokens: Tensor, lengths: Tensor | None, cache: MemspanCache, to_keep: int
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[B, T, V]`` of the last ``to_keep`` columns (0: all) of tokens with padding on the
        right, and the mean auxiliary loss of the segments."""
        n_columns = tokens.shape[1]
        # Without padding and gradients: keys and values of memory are then projected once.
        as_reader = lengths is None and not self.training and not torch.is_grad_enabled()
        kept: list[Tensor] = []
        auxiliary_losses = [tokens.new_zeros((), dtype=self.dtype)] if as_reader else []
        for start in range(0, max(n_columns, 1), self._segment_length):
            segment = tokens[:, start : start + self._segment_length]
            if as_reader:
                logits = cache.read(segment)
            else:
                n_own = None if lengths is None else (lengths - start).clamp(0, segment.shape[1])
                output = self.model(segment, cache.memory, lengths=n_own)
                cache.memory, logits = output.memory, output.logits
                auxiliary_losses.append(output.auxiliary_loss)
            if start + segment.shape[1] > (n_columns - to_keep if to_keep else -1):
                kept.append(logits)
        return torch.cat(kept, 1)[:, -to_keep:], torch.stack(auxiliary_losses).mean()

    def _loss(
        self,
        logits: Tensor,
        targets: Tensor,
        auxiliary_loss: Tensor,
        n_scored_in_update: Tensor | int | None,
    ) -> Tensor:
        """Mean nats per scored token, and the auxiliary loss in training."""
        # At least in float32, whatever the weights are in.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        try:
            nats = F.cross_entropy(
                logits, targets.flatten(), ignore_index=NOT_SCORED, reduction="sum"
            )
        except IndexError:
            raise outside("target", targets, self.config.vocab_size) from None
        n_scored = (targets != NOT_SCORED).sum().clamp(min=1)
        loss = nats / n_scored
        if self.training:
            loss = loss + auxiliary_loss
        return loss if n_scored_in_update is None else loss * n_scored / n_scored_in_update

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """As :meth:`transformers.GenerationMixin.generate`; a cache is taken by either name."""
        given = [options.pop(name, None) for name in ("cache", "past_key_values")]
        if any(each is not None for each in given):
            options[CACHE] = _cache(*given)
        return super().generate(*arguments, **options)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: MemspanCache | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MemspanCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What ``generate`` passes to :meth:`forward`: the new part of ``input_ids``.

        Raises:
            MemspanError: the cache has read all of ``input_ids``, or they are empty.
        """
        if not input_ids.shape[1] and inputs_embeds is None:
            raise MemspanError("input_ids has no tokens: give a prompt of at least one")
        if next_sequence_length is not None and next_sequence_length < 1:
            seen = _cache(cache, past_key_values).get_seq_length()
            raise MemspanError(
                f"the cache has read {seen} columns and the input has {input_ids.shape[1]}: give all "
                "of the text again and what is new, or start with MemspanCache(cache.memory) and "
                "give what is new alone"
            )
        # Stop strings needed it; generate passes it on.
        kwargs.pop("tokenizer", None)
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length,
            inputs_embeds=inputs_embeds,
            **{CACHE: past_key_values if cache is None else cache},
            **kwargs,
        )
        return prepared

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Begin with an empty memory, which reading a prompt in chunks needs."""
        if generation_config.cache_implementation is not None:
            raise MemspanError(
                "cache_implementation is not for this model, whose cache is its memory: leave it out"
            )
        if generation_config.use_cache is not False:
            model_kwargs[CACHE] = _cache(model_kwargs.get(CACHE))

    def _init_weights(self, module: nn.Module) -> None:
        """The model has initialised itself, unless it was made to be filled from files.

        Raises:
            MemspanError: a tensor is missing in those files.
        """
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
        """What ``gradient_checkpointing_enable`` sets, whose own options have no effect: see
        :attr:`memspan.LanguageModel.recompute`."""
        return self.model.recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        self.model.recompute = wanted

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embedding

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Module:
        """Refused.

        Raises:
            MemspanError: always.
        """
        raise MemspanError(
            "the vocabulary of a trained model cannot be resized; the padding token does not need an "
            "embedding, so it may stand outside of it"
        )


def _cache(cache: object, past_key_values: object = None) -> MemspanCache:
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
