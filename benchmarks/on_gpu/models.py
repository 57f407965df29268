"""Training steps and single tokens of every architecture, and the delta rule by its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memspan.models import LanguageModel
from memspan.models.registry import MODELS
from memspan.ops.fast_weights.rules import delta_rule
from on_gpu.jobs import ASK_FOR_PROGRAM, Call, Job, Predicted, one_line
from peers.gpt import GPT
from peers.side import VOCAB_SIZE, Size
from works import autocast

SIZE = Size(512, 8, 2, 2048, segment_length=512, memory_length=512, batch_size=16)
SHORT = replace(SIZE, segment_length=32, memory_length=32, batch_size=64)
"""Size of architectures that read one token after the other."""
TOY = Size(16, 2, 1, 32, segment_length=6, memory_length=4, batch_size=2)
SMALL = Size(64, 2, 2, 128, segment_length=24, memory_length=24, batch_size=2)
"""Where numbers are compared."""
MOST = 1e-4
"""The largest difference that is allowed in float32, of a whole model."""
RULE = (4, 8, 512, 128)
"""``[B, H, T, K]`` of the gated delta rule."""
FEEDBACK = {
    # Of 32 tokens, 113 kernels of both layers in both directions; 4 ms are the rest of the step.
    "graph": Predicted(seconds=32 * 113 * 2.2e-6 + 4e-3, asking=3e-3, n_bytes=600 << 20),
    # 64 programs read 23 MB of weights per token from the cache, at 5.5 TB/s; backward twice as many.
    "triton": Predicted(seconds=32 * 3 * 2.7e-4 + 4e-3, asking=3e-3, n_bytes=600 << 20),
}
"""Implementations of the Feedback Transformer for a GPU, with predictions made by hand."""
PLAIN = "plain-gpt"
ARCHITECTURES = (PLAIN, *MODELS)


def size_of(architecture: str, toy: bool) -> Size:
    if toy:
        return TOY
    return SHORT if architecture == "feedback" else SIZE


def made(architecture: str, size: Size) -> torch.nn.Module:
    """The model, as far as its options know the size."""
    widths = {name: getattr(size, name) for name in ("n_layers", "n_heads", "d_model", "d_ff")}
    torch.manual_seed(0)
    if architecture == PLAIN:
        return GPT(VOCAB_SIZE, size.segment_length, **widths)
    config = MODELS[architecture]
    options = widths | {"memory_length": size.memory_length}
    if architecture == "mamba-2":
        # It has no feed-forward layers, but twice as many others.
        options |= {"n_layers": 2 * size.n_layers}
        del options["d_ff"]
    known = {field.name for field in fields(config)}
    chosen = {name: value for name, value in options.items() if name in known}
    return LanguageModel(VOCAB_SIZE, config(**chosen))


def on(device: torch.device, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` on the device. Tensors without numbers cannot be moved, and are there."""
    return model if device.type == "cpu" else model.to(device)


def training(
    architecture: str, size: Size, precision: str, implementation: str | None, device: torch.device
) -> Call:
    """A step of AdamW on one segment; memory is carried."""
    model = on(device, made(architecture, size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (size.batch_size, size.segment_length)
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    memory = None
    options = {} if implementation is None else {"implementation": implementation}

    def call() -> None:
        nonlocal memory
        with autocast(precision, device.type):
            if isinstance(model, GPT):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            else:
                output = model(tokens, memory, targets=tokens, **options)
                memory = output.memory.detach()
                loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call


def reading(architecture: str, size: Size, device: torch.device, **options: bool) -> Call:
    """One token of one row, after a segment."""
    model = on(device, made(architecture, size)).eval()
    assert isinstance(model, LanguageModel)
    reader = model.reader(batch_size=1, **options)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    reader.read(token.expand(1, size.segment_length))

    def call() -> None:
        nonlocal token
        token = reader.read(token).argmax(-1)

    return call


def passing(architecture: str, size: Size, device: torch.device) -> Call:
    """The same by a pass of all modules, whose operations a CUDA graph has."""
    model = on(device, made(architecture, size)).eval()
    assert isinstance(model, LanguageModel)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    memory = model.initial_memory(1)

    def call() -> None:
        nonlocal memory
        with torch.no_grad():
            output = model(token, memory)
        memory = output.memory
        # Written to where the graph reads.
        for field in memory.tensors().values():
            field.clone()
        output.logits.argmax(-1)

    return call


def jobs_of(architecture: str, toy: bool) -> list[Job]:
    """Training in both precisions, by other implementations where there are some, and a token."""
    size = size_of(architecture, toy)
    tokens = size.batch_size * size.segment_length
    found = []
    for precision, implementation in (("float32", None), ("bfloat16", None)):
        found.append(training_job(architecture, size, precision, implementation, tokens))
    if architecture == "transformer-xl":
        found.append(training_job(architecture, size, "bfloat16", "triton", tokens))
    if architecture == "feedback":
        found += [training_job(architecture, size, "float32", name, tokens) for name in FEEDBACK]
    if architecture != PLAIN:
        found.append(Job("one token", partial(reading, architecture, size), 1))
        graph = partial(reading, architecture, size, cuda_graph=True)
        counted = partial(passing, architecture, size)
        found.append(Job("one token, CUDA graph", graph, 1, captured=counted))
    return found


def training_job(
    architecture: str, size: Size, precision: str, implementation: str | None, tokens: int
) -> Job:
    by = f", {implementation}" if implementation else ""
    how = partial(training, architecture, size, precision)
    programs = FEEDBACK.get(implementation or "") if architecture == "feedback" else None
    return Job(f"training, {precision}{by}", partial(how, implementation), tokens, programs)


def accuracy(device: torch.device) -> Iterator[dict[str, Any]]:
    """Compare what is only chosen by name with what is chosen by itself, in float32: losses and
    gradients of a segment, and logits of single tokens."""
    # The interpreter takes minutes for more.
    size = TOY if device.type == "cpu" else SMALL
    generator = torch.Generator().manual_seed(0)
    shape = (size.batch_size, size.segment_length)
    tokens = torch.randint(VOCAB_SIZE, shape, generator=generator).to(device)

    def trained(model: LanguageModel, implementation: str) -> list[Tensor]:
        memory = model(tokens).memory.detach()
        output = model(tokens, memory, targets=tokens, implementation=implementation)
        return [output.losses, *torch.autograd.grad(output.loss, list(model.parameters()))]

    def told(model: LanguageModel, graph: bool) -> list[Tensor]:
        reader = model.reader(batch_size=len(tokens), **({"cuda_graph": True} if graph else {}))
        reader.read(tokens)
        return [reader.read(tokens[:, n : n + 1]) for n in range(3)]

    for architecture, name in (
        ("transformer-xl", "triton"),
        ("feedback", "graph"),
        ("feedback", "triton"),
    ):
        model = on(device, made(architecture, size))
        ours = partial(trained, model, name)
        yield compared(f"{architecture}, {name}, error", ours, partial(trained, model, "fused"))
    for architecture in MODELS:
        model = on(device, made(architecture, size)).eval()
        ours = partial(told, model, True)
        yield compared(f"{architecture}, CUDA graph, error", ours, partial(told, model, False))


def compared(
    what: str, ours: Callable[[], list[Tensor]], others: Callable[[], list[Tensor]]
) -> dict[str, Any]:
    """A row with the largest difference, as a part of the largest number or of 1."""
    try:
        pairs = zip(ours(), others(), strict=True)
        worst = max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)
    except Exception as error:
        return {"what": what, "error": one_line(error)}
    row = {"what": what, "difference": worst, "at_most": MOST}
    return row if worst < MOST else row | {"error": f"differs by {worst:.1e}"}


def rule_jobs(toy: bool) -> list[Job]:
    """The gated delta rule forward and backward, by each implementation of a GPU."""
    shape = (1, 2, 5, 4) if toy else RULE

    def prepare(name: str, device: torch.device) -> Call:
        batch, heads, length, width = shape
        dtype = torch.bfloat16 if name == "fla" else torch.float32

        def draw(*more: int) -> Tensor:
            return torch.randn(batch, heads, length, *more, device=device)

        given = (draw(width) * width**-0.5, F.normalize(draw(width), dim=-1), draw(width))
        leaves = [t.to(dtype).requires_grad_() for t in given]
        beta = draw().sigmoid()
        decay = -F.softplus(draw())
        memory = torch.zeros(batch, heads, width, width, device=device)

        def call() -> None:
            y, _ = delta_rule(*leaves, beta, memory, log_decay=decay, implementation=name)
            torch.autograd.grad(y.float().sum(), leaves)

        return call

    tokens = shape[0] * shape[2]
    # Some 25 programs, each asked for by Python.
    fla = Predicted(seconds=2e-4, asking=25 * ASK_FOR_PROGRAM, n_bytes=120 << 20)
    return [
        Job("gated delta rule, chunked", partial(prepare, "chunked"), tokens),
        Job("gated delta rule, fla", partial(prepare, "fla"), tokens, fla),
    ]
