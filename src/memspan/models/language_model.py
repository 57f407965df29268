"""A language model: token embedding, any of the backbones, output head."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from memspan.calls import names_checked
from memspan.errors import MemspanError, StaleReaderError, counted
from memspan.files.tensors import digest, named
from memspan.memory import Memory, source_of
from memspan.models.defaults import not_replicated
from memspan.models.embedding import (
    Embedding,
    Head,
    after_loading,
    before_loading,
    losses_of,
    tie,
    tied_names,
    with_ties,
)
from memspan.models.fingerprints import fingerprint
from memspan.models.in_place import BufferedReader
from memspan.models.initialisation import initialise
from memspan.models.inputs import check_tokens, outside, own_lengths, refuse_targets_outside
from memspan.models.known import known
from memspan.models.options import BackboneConfig, EmbeddingConfig, check_parts
from memspan.models.output import BackboneOutput, Output
from memspan.models.packing import Watch, is_itself
from memspan.models.protocol import Backbone
from memspan.models.readers import MemoryReader, by_one_thread, not_copied
from memspan.models.remedies import refuse_with_remedy
from memspan.models.segments import Padding, padding_mask
from memspan.models.sizes import refuse_impossible, refuse_oversized, refuse_oversized_model
from memspan.models.vocabulary import resize
from memspan.nn import NOT_SCORED, dropout_layer
from memspan.precision import Precision


@known()
class LanguageModel(nn.Module):
    """``model(tokens, memory) -> output``, pure: the memory passed in is not changed.

    Args:
        vocab_size: number of token ids, V.
        backbone: the architecture's config, such as :class:`~memspan.models.TransformerXLConfig`.
        embedding: embedding and head options.
    """

    _replicate_for_data_parallel = not_replicated

    def __init__(
        self, vocab_size: int, backbone: BackboneConfig, embedding: EmbeddingConfig | None = None
    ) -> None:
        super().__init__()
        embedding = EmbeddingConfig() if embedding is None else embedding
        check_parts(vocab_size, backbone, embedding)
        refuse_oversized_model(backbone, vocab_size, embedding)
        self.vocab_size = vocab_size
        self._embedding_options = embedding
        self.embedding = Embedding(vocab_size, backbone.d_model, embedding)
        self.head = Head(self.embedding, embedding)
        self.output_dropout = dropout_layer(embedding.output_dropout)
        # The backbone initialises itself.
        initialise(nn.ModuleList([self.embedding, self.head]), backbone.initialisation)
        with refuse_impossible("the model"):
            self.backbone: Backbone[Any] = backbone.build()
        self.register_load_state_dict_pre_hook(before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(after_loading)  # type: ignore[no-untyped-call]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """See :meth:`torch.nn.Module.load_state_dict`. Of names that share a tensor, one is enough."""
        if strict and isinstance(state_dict, Mapping):
            state_dict = with_ties(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, *arguments: Any, **options: Any) -> LanguageModel:
        # All conversions and moves go through here, and some make a new Parameter for each name.
        names = tied_names(self)
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        tie(self, names)
        return self

    @names_checked
    def initial_memory(self, batch_size: int, **options: object) -> Memory:
        """A memory before the first token; ``options`` are the backbone's."""
        if type(batch_size) is not int or batch_size < 0:
            raise MemspanError(f"batch_size must be a number of rows, not {batch_size!r}")
        make: Callable[..., Memory] = self.backbone.initial_memory
        _refuse_unknown("memory", make, options)
        with refuse_impossible("the memory"):
            needed = batch_size * make(1, **options).nbytes
        remedy = "lower the number of rows, or memory_length"
        refuse_oversized(
            f"the memory of {counted(batch_size, 'row')}", needed, self.backbone.device, remedy
        )
        return make(batch_size, **options)

    def resize_token_embeddings(self, vocab_size: int) -> None:
        """Add rows to the end of the embedding and the output head, or drop the last ones, in place.

        Each new row, and its bias, starts as the mean of the rows that there were; with clusters of
        falling frequency (``cutoffs``), of the last cluster's, which all new tokens join. A new token
        then begins about as likely as the average one there, and old tokens keep their logits, or their
        clusters' probabilities (Hewitt 2021, "Initializing new word embeddings for pretrained language
        models"). What is tied stays tied.

        Parameters are replaced, and with them the fingerprint: make optimisers and readers afterwards.
        Memories stay valid values, though files of them name the old model.

        Args:
            vocab_size: the new number of token ids, V; the same number changes nothing.

        Raises:
            MemspanError: a vocabulary that ends before the last cluster; an embedding or a head that
                was replaced by another module; tables that several processes share.

        Example::

            model.resize_token_embeddings(model.vocab_size + 3)
        """
        if vocab_size != self.vocab_size:
            resize(self, vocab_size)

    @names_checked
    def load_memory(self, path: str | Path | IO[bytes], batch_size: int | None = None) -> Memory:
        """A memory of this model's that ``memory.save(path, model.fingerprint())`` wrote.

        Args:
            path: a path, or a file object that is open for reading bytes.
            batch_size: the rows that it must have (None: as many as the file has).

        Raises:
            MemspanError: the file is missing, damaged or not a memory; it belongs to another model; it
                has other sizes, or another number of rows.

        Example::

            memory = model.load_memory("book.memory")
            reader = model.reader(memory)
        """
        like = self.initial_memory(0)
        source = source_of(path)
        memory = self.backbone.load_memory(source, self.fingerprint(), like)
        if batch_size not in (None, memory.batch_size):
            raise MemspanError(
                f"{named(source)} holds {counted(memory.batch_size, 'row')} of memory, and "
                f"batch_size is {batch_size}: leave it out, and pick rows of the loaded memory, as "
                "in memory[0]"
            )
        return memory.to(like.tokens_seen.device)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        targets: Tensor | None = None,
        starts: Tensor | None = None,
        lengths: Tensor | list[int] | None = None,
        padding: Padding = "right",
        implementation: str | None = None,
    ) -> Output:
        """Read a segment.

        Args:
            tokens: int64 ``[B, T]``.
            memory: what was read before (None: nothing).
            targets: int64 ``[B, T]``; with them, losses instead of logits. A target of -100 is not
                scored.
            starts: bool ``[B, T]``, true where a document begins: nothing before it is visible from
                there on (None: no document begins in this segment).
            lengths: integers ``[B]``, each row's number of tokens; the rest is padding, which changes
                nothing and is not scored (None: no padding). Tokens and targets there may be any.
            padding: the side that padding is on.
            implementation: how the backbone computes, one of its ``implementations`` (None: the fastest
                that can run here). Every architecture has ``reference``, the paper's equations in plain
                autograd: slow, but double backward and ``torch.func``'s ``grad`` and ``vmap``
                (gradients per sample) work with it; vmap not with adaptive embeddings.

        Raises:
            MemspanError: an argument is not as described here; the implementation does not exist, or
                cannot run with this model here.
        """
        check_tokens(tokens, targets)
        if lengths is not None:
            lengths = own_lengths(lengths, tokens, padding)
            own = padding_mask(lengths, tokens.shape[1], padding)
            tokens = tokens.masked_fill(~own, 0)
            targets = None if targets is None else targets.masked_fill(~own, NOT_SCORED)
        options = {"starts": starts, "lengths": lengths, "padding": padding}
        try:
            return self._read(tokens, memory, targets, implementation=implementation, **options)
        except RuntimeError as error:
            refuse_with_remedy(error, self, tokens, implementation)
            raise

    def _read(
        self, tokens: Tensor, memory: Memory | None, targets: Tensor | None, **options: Any
    ) -> Output:
        """:meth:`forward`, after its checks; ``options`` are the backbone's."""
        out: BackboneOutput[Memory] = self.backbone(self._embed(tokens), memory, **options)
        logits = losses = n_scored = None
        hidden = self.output_dropout(out.hidden)
        if targets is None:
            logits = self.head(hidden)
        else:
            losses = self._losses(hidden, targets)
            n_scored = (targets != NOT_SCORED).sum()
        return Output(out.memory, out.auxiliary_loss, logits, losses, n_scored, out.statistics)

    def _embed(self, tokens: Tensor) -> Tensor:
        """``int64 [B, T] -> [B, T, D]``; a token outside the vocabulary is refused."""
        try:
            return self.embedding(tokens)
        except IndexError:
            raise outside("token", tokens, self.vocab_size) from None

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """``[B, T, D], int64 [B, T] -> [B, T]`` in nats, 0 for a target of -100."""
        try:
            # A wrapper of a head may forward the losses of the head inside, which are not its own.
            if hasattr(type(self.head), "losses"):
                return self.head.losses(hidden, targets)
            return losses_of(self.head(hidden), targets)
        except IndexError:
            raise outside("target", targets, self.vocab_size) from None

    def reader(
        self,
        memory: Memory | None = None,
        batch_size: int = 1,
        *,
        precision: Precision | None = None,
        **options: object,
    ) -> Reader:
        """Read on from ``memory`` without gradients, as fast as can be: evaluation, generation.

        Args:
            memory: what was read before (None: nothing).
            batch_size: rows, where there is no memory to take them from.
            precision: of products while it reads (None: as torch is set at that time).
            options: the backbone's, such as Transformer-XL's and Compressive's ``attention_span`` and
                ``clamp_length``: how this reader reads, where that differs from training. The model
                and its fingerprint stay as they are.
        """
        _refuse_unknown("reader", self.backbone.reader, options)
        return Reader(self, memory, batch_size, options, precision)

    @property
    def recompute(self) -> bool:
        """Activation checkpointing: layers, and chunks of the logits that losses need, keep only what
        they are given for backward, and are computed again there. It may be set at any time, and
        changes no number; ``docs/scaling.md`` has what it saves and costs."""
        return self.backbone.recompute

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        self.backbone.recompute = self.head.recompute = wanted

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Parameters whose gradients are clipped together.

        Parameters of an auxiliary loss are a separate group, so that its gradients take no share of the
        task's.
        """
        apart = self.backbone.auxiliary_parameters()
        ids = {id(p) for p in apart}
        groups = [[p for p in self.parameters() if id(p) not in ids], apart]
        return [group for group in groups if group]

    def units(self) -> list[nn.Module]:
        """See :meth:`memspan.models.Backbone.units`."""
        return self.backbone.units()

    def float32_part(self) -> str | None:
        """Name the part computed in float32 even under bfloat16 autocast (None: none that counts)."""
        return self.backbone.float32_part()

    def fingerprint(self) -> str:
        """SHA-256 of the options that change the function, and of all parameters: a memory file carries
        its model's."""
        return fingerprint(self.backbone.config, self._embedding_options, digest(self.state_dict()))


class Reader:
    """A position in a stream of tokens: :meth:`read` returns the model's output and moves on.

    Each row is a stream of its own: :meth:`reset` and :meth:`replace` end some of them while the others
    go on (docs/guides/many-streams.md).

    Results equal those of ``model(tokens, memory)`` in evaluation mode, whatever its modules are when
    the reader is made. Cached values, such as projected keys and values of memory, are valid for these
    weights only, so reading on is refused once the weights have changed: by an optimiser's step,
    ``load_state_dict``, a conversion or a change in place. Swapped modules, new hooks and writes
    through ``parameter.data`` are not noticed: make a new reader after them.
    """

    __reduce_ex__ = not_copied

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory | None,
        batch_size: int,
        options: dict[str, Any],
        precision: Precision | None = None,
    ) -> None:
        self._model = model
        self._precision = precision
        if memory is None:
            memory = model.initial_memory(batch_size)
        memory = model.backbone.own_memory(memory, batch_size)
        self._rows = memory.batch_size
        self._by_call = _by_call(model)
        self._of = model.backbone
        self.in_use = threading.RLock()
        if self._by_call and options:
            raise MemspanError(
                f"{', '.join(sorted(options))}: only a LanguageModel without hooks reads with these"
            )
        self._backbone: Any = MemoryReader(memory)
        if not self._by_call:
            with self._inference():
                self._backbone = model.backbone.reader(memory, self._rows, **options)
            # Readers of other packages may have the protocol's methods alone.
            self._read_hidden = getattr(self._backbone, "read_embedded", self._backbone.read)
        # A reader that watches its backbone is enough.
        watches = isinstance(self._backbone, BufferedReader)
        self._watch = Watch(*((model.embedding, model.head) if watches else (model,)))

    @property
    def device(self) -> torch.device:
        """The device that it reads on."""
        return next(self._model.parameters()).device

    @property
    def memory(self) -> Memory:
        """The memory after the last token: a value that may be saved, branched or trained on."""
        return self._backbone.memory

    @property
    def is_stale(self) -> bool:
        """True once the weights have changed since the reader was made, which ends its use."""
        watches = [self._watch, getattr(self._backbone, "watch", self._watch)]
        return self._model.backbone is not self._of or any(w.has_changed() for w in watches)

    def _refuse_changes(self) -> None:
        """Refuse changes of all that the backbone's reader does not watch itself."""
        if self._model.backbone is not self._of:
            raise StaleReaderError
        self._watch.refuse_changes()

    def read(
        self, tokens: Tensor, *, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Logits ``[B, T, V]`` of ``tokens [B, T]``, or with ``targets`` losses ``[B, T]`` in nats.

        ``starts``: bool ``[B, T]``, true where a document begins, as in the model's call.

        Raises:
            MemspanError: an argument is not as described here.
            StaleReaderError: the weights have changed since the reader was made.
        """
        check_tokens(tokens, targets)
        self._refuse_changes()
        if len(tokens) != self._rows:
            raise MemspanError(
                f"the reader has {counted(self._rows, 'row')}, and the tokens have {len(tokens)}: give "
                "as many"
            )
        if targets is not None and isinstance(self._model.head, Head):
            # Here, since the head would notice when the reader has moved on.
            refuse_targets_outside(targets, self._model.vocab_size)
        with self._inference():
            if self._by_call:
                return self._read_by_call(tokens, targets, starts)
            hidden = self._read_hidden(self._model._embed(tokens), starts)
            hidden = self._model.output_dropout(hidden)
            if targets is None:
                return self._model.head(hidden)
            return self._model._losses(hidden, targets)

    @by_one_thread
    def _read_by_call(
        self, tokens: Tensor, targets: Tensor | None, starts: Tensor | None
    ) -> Tensor:
        """By a pass of the model itself, which a subclass or a hook has made another one."""
        output: Output = self._model(tokens, self.memory, targets=targets, starts=starts)
        self._backbone.memory = output.memory
        result = output.logits if targets is None else output.losses
        assert result is not None
        return result

    @names_checked
    def select(self, rows: Tensor | list[int]) -> Memory:
        """The memory of some rows: ``reader.memory.select(rows)``, without a copy of the others.

        Args:
            rows: integers ``[B']``, in any order, repeated or not. Nothing waits for the device if they
                are on the CPU.

        Raises:
            MemspanError: a row does not exist.
        """
        return self._backbone.select(rows)

    @names_checked
    def reset(self, mask: Tensor | list[bool]) -> None:
        """Begin anew in the rows where ``mask`` (bool ``[B]``) is true; the others are untouched.

        For documents that begin within the tokens of one call, ``starts`` of :meth:`read` does it.
        Nothing waits for the device if the mask is on the CPU.

        Raises:
            MemspanError: the mask is not one bool per row; the weights have changed since the reader
                was made. The reader stays as it was.
        """
        self._refuse_changes()
        with self._inference():
            self._backbone.reset(mask)

    @names_checked
    def replace(self, rows: Tensor | list[int], memory: Memory) -> None:
        """Go on from row ``i`` of ``memory`` in row ``rows[i]``, for each ``i``: one stream leaves the
        batch and another takes its place. The other rows are untouched.

        Nothing waits for the device if both are on the CPU.

        Args:
            rows: integers ``[B']``, each row at most once.
            memory: ``B'`` rows of this model's, such as ``reader.select(rows)`` or what
                ``model.load_memory`` returns; of as many slots as this reader was made with. It is
                not changed.

        Raises:
            MemspanError: the rows or the memory are not as described here; the weights have changed
                since the reader was made. The reader stays as it was. A memory of the same sizes from
                another model is not noticed here, but by ``model.load_memory``.

        Example::

            waiting = reader.select([3])
            reader.replace([3], next_memory)
        """
        self._refuse_changes()
        with self._inference():
            self._backbone.replace(rows, memory)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        backbone = self._model.backbone
        # Another model, which trains, may have the same. A wrapper's mode says nothing.
        if self._model.training or (isinstance(backbone, Backbone) and backbone.training):
            raise MemspanError(
                "a reader needs model.eval(), and its backbone's: dropout must be off"
            )
        precision = self._precision
        applied = precision.applied(self.device) if precision else nullcontext()
        # Tensors made in inference mode can only be changed there, and the memory is changed in place.
        with torch.inference_mode(False), torch.no_grad(), applied:
            yield


def _refuse_unknown(what: str, method: Any, options: dict[str, object]) -> None:
    if unknown := set(options) - set(inspect.signature(method).parameters):
        raise MemspanError(
            f"{', '.join(sorted(unknown))} is not an option of a "
            f"{type(method.__self__).__name__}'s {what}: leave it out"
        )


def _by_call(model: LanguageModel) -> bool:
    """Check whether the model must be called to read: it is a subclass, has hooks, or its backbone is
    wrapped in another module, which a reader of the backbone would skip."""
    return not (is_itself(model, LanguageModel) and isinstance(model.backbone, Backbone))
