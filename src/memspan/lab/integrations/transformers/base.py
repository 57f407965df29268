"""Base of our models in transformers: weights, reading, embeddings."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from memspan.errors import MemspanError
from memspan.lab.integrations.transformers.cache import MemspanCache
from memspan.lab.integrations.transformers.config import MemspanConfig
from memspan.lab.integrations.transformers.packed import document_starts
from memspan.models import LanguageModel
from memspan.models.inputs import check_tokens, check_vectors

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
        cache: MemspanCache,
        wanted: tuple[str, ...],
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        targets: Tensor | None = None,
        to_keep: int = 0,
        bounds: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Read on from ``cache``.

        Args:
            wanted: names of ``logits [B, T, V]``, ``hidden [B, T, D]``, the head's input, and
                ``embeddings [B, T, D]``, the backbone's.
            to_keep: columns, from the right, that are wanted (0: all).
            bounds: of documents packed into a row, see :func:`document_starts` (None: there must not
                be any).

        Returns:
            The wanted tensors; the mean auxiliary loss; bool ``[B, T]``, false at padding.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise MemspanError("give the model input_ids or inputs_embeds, one of the two")
        if inputs_embeds is None:
            assert input_ids is not None
            x = input_ids
            check_tokens(x, targets)
            padding = self.config.padding_id
            own = torch.ones_like(x, dtype=torch.bool) if padding is None else x != padding
        else:
            x = inputs_embeds
            check_vectors(x, self.model.embedding.d_model, next(self.parameters()))
            own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            check_tokens(own.long(), targets)
        if attention_mask is not None:
            own = own & _of_new_columns(attention_mask, own, cache.get_seq_length())
        starts = document_starts(own, position_ids, bounds or {})
        if bounds is None and starts is not None:
            raise MemspanError(
                "position_ids begin anew within a row, which is read as one text here: give each "
                "document a row of its own"
            )
        cache.bind(self.model, len(x))
        read = self._read if own.all() else self._read_padded
        made, auxiliary_loss = read(cache, wanted, x, own, starts, to_keep)
        if own.numel():
            cache.count(own.shape[1], made["logits"][:, -1] if "logits" in wanted else None)
        if targets is None and self.training and auxiliary_loss.requires_grad:
            warnings.warn(
                f"{type(self.model.backbone).__name__} has an auxiliary loss, which only the model's "
                "own loss contains: give it labels, or a part of it is not trained",
                stacklevel=4,
            )
        return made, auxiliary_loss, own

    def _wants_hidden_states(self, asked: bool | None) -> bool:
        return bool(self.config.output_hidden_states if asked is None else asked)

    def _hidden_states(self, made: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """As many as in other models, one before and one after each layer; those between are None."""
        between = [None] * (len(self.model.backbone.layers) - 1)
        return made["embeddings"], *between, made["hidden"]

    def _read_padded(
        self,
        cache: MemspanCache,
        wanted: tuple[str, ...],
        x: Tensor,
        own: Tensor,
        starts: Tensor | None,
        to_keep: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """As :meth:`_read`; padding is where ``own [B, T]`` is false, and has what the row's token
        before it has."""
        before = cache.last_logits
        # All padding to the right, which keeps the order of a row's own tokens.
        order = (~own).to(torch.uint8).argsort(dim=1, stable=True)
        own_x = x.masked_fill(~own if x.dim() == 2 else ~own[..., None], 0)
        moved = own_x[torch.arange(len(x), device=x.device)[:, None], order]
        latest = own.cumsum(1)[:, -to_keep:, None]
        # Earlier logits are not kept: those of a long prompt take gigabytes.
        unwanted = max(int(latest.min()) - 1, 0)
        own_first = own.gather(1, order)
        starts = None if starts is None else starts.gather(1, order)
        made, auxiliary_loss = self._read(
            cache, wanted, moved, own_first, starts, x.shape[1] - unwanted
        )
        for name, y in made.items():
            first = before if name == "logits" and before is not None else torch.zeros_like(y[:, 0])
            y = torch.cat([first[:, None], y], 1)
            made[name] = y.gather(1, (latest - unwanted).expand(-1, -1, y.shape[2]))
        return made, auxiliary_loss

    def _read(
        self,
        cache: MemspanCache,
        wanted: tuple[str, ...],
        x: Tensor,
        own: Tensor,
        starts: Tensor | None,
        to_keep: int,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Read tokens or vectors ``x`` with padding on the right; ``starts``, bool ``[B, T]``, is true
        where a document begins.

        Returns:
            The wanted tensors of the last ``to_keep`` columns (0: all); the mean auxiliary loss.
        """
        model = self.model
        n_columns = x.shape[1]
        lengths = None if own.all() else own.sum(1)
        by_model = wanted == ("logits",) and x.dim() == 2
        # Without padding and gradients: keys and values of memory are then projected once.
        as_reader = (
            by_model
            and lengths is None
            and starts is None
            and not self.training
            and not torch.is_grad_enabled()
        )
        kept: list[dict[str, Tensor]] = []
        auxiliary_losses = [x.new_zeros((), dtype=self.dtype)] if as_reader else []
        for start in range(0, max(n_columns, 1), self._segment_length):
            segment = x[:, start : start + self._segment_length]
            made: dict[str, Tensor] = {}
            if as_reader:
                made["logits"] = cache.read(segment)
            else:
                n_own = None if lengths is None else (lengths - start).clamp(0, segment.shape[1])
                begin = None if starts is None else starts[:, start : start + segment.shape[1]]
                if by_model:
                    output = model(segment, cache.memory, lengths=n_own, starts=begin)
                    made["logits"] = output.logits
                else:
                    vectors = model._embed(segment) if x.dim() == 2 else segment
                    output = model.backbone(vectors, cache.memory, lengths=n_own, starts=begin)
                    hidden = model.output_dropout(output.hidden)
                    made = {"embeddings": vectors, "hidden": hidden}
                    if "logits" in wanted:
                        made["logits"] = model.head(hidden)
                cache.memory = output.memory
                auxiliary_losses.append(output.auxiliary_loss)
            if start + segment.shape[1] > (n_columns - to_keep if to_keep else -1):
                kept.append({name: made[name] for name in wanted})
        joined = {name: torch.cat([m[name] for m in kept], 1)[:, -to_keep:] for name in wanted}
        return joined, torch.stack(auxiliary_losses).mean()

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
            # Even without files a model may be made without memory for its weights.
            if tensor is not None and not (
                tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)
            ):
                raise MemspanError(
                    f"the weights lack {name} of a {type(module).__name__}: they are damaged, or of "
                    "another config.json; weights that are tied have no tie_word_embeddings=False"
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

    @property
    def embeddings(self) -> nn.Module:
        """Holds the token embedding as ``word_embeddings``, where PEFT's prompts look for it."""
        return nn.ModuleDict({"word_embeddings": self.model.embedding})

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


def _of_new_columns(attention_mask: Tensor, own: Tensor, n_before: int) -> Tensor:
    """Bool ``[B, T]``: the part of the mask that belongs to the new columns ``own [B, T]``."""
    rows, n_columns = own.shape
    if attention_mask.shape not in ((rows, n_columns), (rows, n_before + n_columns)):
        raise MemspanError(
            f"attention_mask must have {rows} rows and cover the {n_columns} new columns, or "
            f"all {n_before + n_columns}: it is {list(attention_mask.shape)}"
        )
    return attention_mask[:, attention_mask.shape[1] - n_columns :] != 0


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
