"""A language model with a memory as a model of transformers: only the interface, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple

from memspan.errors import MemspanError
from memspan.lab.integrations.transformers.base import (
    CACHE,
    MemspanPreTrainedModel,
    both_names,
    chosen_cache,
)
from memspan.lab.integrations.transformers.cache import MemspanCache
from memspan.lab.integrations.transformers.config import MemspanConfig
from memspan.lab.integrations.transformers.packed import bounds_in
from memspan.models.inputs import outside
from memspan.nn import NOT_SCORED


@both_names
@dataclass
class MemspanOutput(CausalLMOutputWithPast):
    """``loss``, ``logits`` and the cache."""


@both_names
@dataclass
class MemspanHiddenOutput(BaseModelOutputWithPast):
    """``last_hidden_state`` and the cache."""


@both_names
@dataclass
class MemspanClassifierOutput(SequenceClassifierOutputWithPast):
    """``loss``, ``logits`` and the cache."""


def _refuse(given: dict[str, Any]) -> None:
    if unknown := [
        name for name, value in given.items() if value is not None and value is not False
    ]:
        raise MemspanError(f"{', '.join(unknown)}: not for this model, leave it out")


class MemspanForCausalLM(MemspanPreTrainedModel, GenerationMixin):
    """Any architecture of memspan, with the methods of transformers' models: ``generate``,
    ``save_pretrained`` and the others.

    ``self.model`` is the :class:`memspan.LanguageModel`. Instead of caching keys and values, it has a
    memory of constant size, see :class:`MemspanCache`.

    Args:
        config: its options.

    Raises:
        MemspanError: the options are invalid.
    """

    accepts_loss_kwargs = True

    def __init__(self, config: MemspanConfig) -> None:
        super().__init__(config)
        self.generation_config.pad_token_id = config.padding_id
        self.post_init()

    @property
    def base_model(self) -> nn.Module:
        """The model up to its head, which returns hidden states."""
        return _WithoutHead(self)

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
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
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
            num_items_in_batch: labels of all batches of an update but those of the first column and
                those of -100, as ``Trainer`` counts them (None: those of this batch).
            use_cache: False returns no cache.
            logits_to_keep: columns, from the right, whose logits are wanted (0: all).
            inputs_embeds: ``[B, T, D]``, in place of ``input_ids``: vectors such as those that
                ``get_input_embeddings()`` makes of tokens.
            output_hidden_states: whether to return ``hidden_states`` (None: as the config says).
            position_ids: ``[B, T]`` or ``[1, T]``: each token one after the last, as the model reads
                them, or, at a row's next document, from 0 again. Nothing before a document is visible
                from it.
            past_key_values: the name of ``cache`` before transformers 5.24.
            kwargs: ``shift_labels``, which are labels, but each in the column before, where it is
                predicted: needed to score the first token of each segment of a stream. As in other
                models it is not in the signature, where the trainer would ask for both kinds. And what
                collators give beside packed documents, or in place of ``position_ids``: ``seq_idx``,
                ``cu_seq_lens_q`` and others.

        Returns:
            ``loss``, where there are labels: mean nats per token, and in training the architecture's
            auxiliary loss. ``logits [B, T, V]``; at padding those after the row's last token.
            ``cache``, also as ``past_key_values``. ``hidden_states``, where they are wanted: one before
            the first layer and one after each, of which only the first, the embeddings, and the last,
            the head's input, are tensors ``[B, T, D]``; the others are None.

        Raises:
            MemspanError: an argument is not as described here.
        """
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise MemspanError(
                f"logits_to_keep must be a number of columns, 0 for all, not {logits_to_keep!r}"
            )
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        bounds = bounds_in(kwargs)
        _refuse(kwargs)
        targets = labels if shift_labels is None else shift_labels
        cache = chosen_cache(cache, past_key_values)
        hidden_states_too = self._wants_hidden_states(output_hidden_states)
        made, auxiliary_loss, own = self._read_on(
            cache,
            ("logits", "hidden", "embeddings") if hidden_states_too else ("logits",),
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            targets,
            0 if hidden_states_too else logits_to_keep,
            bounds,
        )
        logits = made["logits"][:, -logits_to_keep:]
        loss = None
        if targets is not None:
            n_counted = (targets != NOT_SCORED).sum()
            if shift_labels is None:
                # Each in the column before its own.
                n_counted = (targets[:, 1:] != NOT_SCORED).sum()
                targets = F.pad(
                    targets.masked_fill(~own, NOT_SCORED)[:, 1:], (0, 1), value=NOT_SCORED
                )
            loss = self._loss(logits, targets.masked_fill(~own, NOT_SCORED), auxiliary_loss)
            if num_items_in_batch is not None:
                # With padding on the left a row's first label is counted, though nothing predicts it.
                loss = loss * n_counted / num_items_in_batch
        returned = None if use_cache is False else cache
        hidden_states = self._hidden_states(made) if hidden_states_too else None
        return MemspanOutput(
            loss=loss, logits=logits, hidden_states=hidden_states, **{CACHE: returned}
        )

    def _loss(self, logits: Tensor, targets: Tensor, auxiliary_loss: Tensor) -> Tensor:
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
        return loss + auxiliary_loss if self.training else loss

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """As :meth:`transformers.GenerationMixin.generate`; a cache is taken by either name."""
        given = [options.pop(name, None) for name in ("cache", "past_key_values")]
        if any(each is not None for each in given):
            options[CACHE] = chosen_cache(*given)
        return super().generate(*arguments, **options)

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse transformers' continuous batching, which pages keys and values that are not there.

        Raises:
            MemspanError: says what to use instead.
        """
        raise MemspanError(
            "generate_batch and continuous batching page keys and values, and this model has a memory "
            "instead: call generate with a padded batch, or take many streams by "
            "model.model.reader(batch_size=...), whose rows begin and end on their own"
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: MemspanCache | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: MemspanCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare the arguments of :meth:`forward`: the new part of ``input_ids``.

        Raises:
            MemspanError: the cache has read all of ``input_ids``, or they are empty.
        """
        if not input_ids.shape[1] and inputs_embeds is None:
            raise MemspanError("input_ids has no tokens: give a prompt of at least one")
        if next_sequence_length is not None and next_sequence_length < 1:
            seen = chosen_cache(cache, past_key_values).get_seq_length()
            raise MemspanError(
                f"the cache has read {seen} columns and the input has {input_ids.shape[1]}: give all "
                "of the text again, the new part included, or start with MemspanCache(cache.memory) "
                "and give the new part alone"
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
            model_kwargs[CACHE] = chosen_cache(model_kwargs.get(CACHE))


class _WithoutHead(nn.Module):
    """A model up to its head, which other libraries call: its weights stay the model's."""

    def __init__(self, model: MemspanPreTrainedModel) -> None:
        super().__init__()
        vars(self)["_model"] = model

    def forward(self, *arguments: Any, **options: Any) -> Any:
        model = vars(self)["_model"]
        if model.get_output_embeddings() is None:
            raise MemspanError(
                "an adaptive softmax is not one matrix, so losses cannot be made from hidden states: "
                "give the model labels instead"
            )
        return MemspanModel.forward(model, *arguments, **options)


class MemspanModel(MemspanPreTrainedModel):
    """Any architecture of memspan up to its head: hidden states instead of logits.

    Args:
        config: its options.

    Raises:
        MemspanError: the options are invalid.
    """

    def __init__(self, config: MemspanConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: MemspanCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemspanCache | None = None,
        **kwargs: Any,
    ) -> MemspanHiddenOutput:
        """Read on. Arguments are those of :meth:`MemspanForCausalLM.forward`.

        Returns:
            ``last_hidden_state [B, T, D]``, what the head makes logits of; at padding that after the
            row's last token in this call, and zero before its first. ``hidden_states``, where they are
            wanted, as described there. ``cache``, also as ``past_key_values``.

        Raises:
            MemspanError: an argument is not as described there.
        """
        bounds = bounds_in(kwargs)
        _refuse(kwargs)
        cache = chosen_cache(cache, past_key_values)
        wanted = ("hidden", "embeddings")
        made, _, _ = self._read_on(
            cache, wanted, input_ids, inputs_embeds, attention_mask, position_ids, bounds=bounds
        )
        too = self._wants_hidden_states(output_hidden_states)
        return MemspanHiddenOutput(
            last_hidden_state=made["hidden"],
            hidden_states=self._hidden_states(made) if too else None,
            **{CACHE: None if use_cache is False else cache},
        )


class MemspanForSequenceClassification(MemspanPreTrainedModel):
    """Scores of a text's classes, made from the hidden state after its last token.

    Args:
        config: its options; ``num_labels`` is transformers'.

    Raises:
        MemspanError: the options are invalid.
    """

    def __init__(self, config: MemspanConfig) -> None:
        super().__init__(config)
        d_model = self.model.backbone.config.d_model
        self.score = nn.Linear(d_model, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: MemspanCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: MemspanCache | None = None,
        **kwargs: Any,
    ) -> MemspanClassifierOutput:
        """Classify. Arguments are those of :meth:`MemspanForCausalLM.forward`, but for ``labels``:
        int64 ``[B]``, or what ``config.problem_type`` asks for.

        Returns:
            ``loss``, where there are labels, ``logits [B, num_labels]``, and ``cache``, also as
            ``past_key_values``.

        Raises:
            MemspanError: an argument is not as described here.
        """
        _refuse(kwargs)
        cache = chosen_cache(cache, past_key_values)
        # The last column is after a row's last token, wherever its padding is.
        made, _, _ = self._read_on(
            cache, ("hidden",), input_ids, inputs_embeds, attention_mask, position_ids, to_keep=1
        )
        logits = self.score(made["hidden"][:, -1])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, logits=logits, pooled_logits=logits, config=self.config
            )
        returned = None if use_cache is False else cache
        return MemspanClassifierOutput(loss=loss, logits=logits, **{CACHE: returned})
