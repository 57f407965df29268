"""Hybrid models of transformers on a CPU, with and without ``accelerate``, in float32.

    python benchmarks/gated_delta_models.py [--models qwen3.5,olmo-hybrid] [--rounds 5] [--seconds 0.5]

writes ``results/gated-delta-models.json``: for generation, reading and fine-tuning, whole and with LoRA
where PEFT is installed, the ratio of CPU time and tokens per CPU second. The models are random, of
about 20 million parameters. Needs transformers. Nothing is measured unless logits and gradients agree
to 2e-5.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch

import timing
from memspan.integrations.transformers import accelerate
from timing import interleaved, ratio

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "qwen3.5": ("qwen3_5_text", (8, 8, 128, 128)),
    "olmo-hybrid": ("olmo_hybrid", (4, 4, 96, 192)),
}
HEADS = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
"""A type of transformers, and the heads of its gated-delta layers: in proportion to
the width as in the smallest of Qwen3.5 (0.8 billion parameters) and OLMo Hybrid (7 billion)."""
PROMPT, NEW = 16, 32
Work = Callable[[], object]


def build(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    heads = {f"linear_{part}": size for part, size in zip(HEADS, sizes, strict=True)}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **heads)).eval()


def low_rank(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=8)
    return peft.get_peft_model(copy.deepcopy(model), config)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (rows, length))


def step(model: Any, rows: int, length: int) -> Work:
    """One of AdamW, in training mode."""
    model.train()
    ids = tokens(rows, length)
    # So slowly that the model stays as it is.
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-9)

    def work() -> None:
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return work


def reading(model: Any, rows: int, length: int) -> Work:
    model.eval()
    ids = tokens(rows, length)

    @torch.no_grad()
    def work() -> None:
        model(ids, logits_to_keep=1)

    return work


def generation(model: Any, rows: int) -> Work:
    model.eval()
    ids = tokens(rows, PROMPT)
    return lambda: model.generate(ids, max_new_tokens=NEW, do_sample=False)


def layer(model: Any, rows: int, length: int) -> Work:
    """Forward and backward through one, with its products."""
    part = model.model.layers[0].linear_attn
    x, upstream = torch.randn(2, rows, length, SIZES["hidden_size"]).unbind()
    wanted = [x.requires_grad_(), *part.parameters()]
    return lambda: torch.autograd.grad(part(x), wanted, upstream)


def works(model: Any, adapted: Any | None) -> dict[tuple[str, int, int], Callable[[], Work]]:
    """What is measured: its name, rows, and tokens of a row."""
    found: dict[tuple[str, int, int], Callable[[], Work]] = {
        ("generation", 1, NEW): lambda: generation(model, 1),
        ("generation", 4, NEW): lambda: generation(model, 4),
        ("reading", 1, 512): lambda: reading(model, 1, 512),
    }
    for rows, length in ((1, 512), (4, 64)):
        size = rows, length
        found["training, one layer", *size] = lambda size=size: layer(model, *size)
        found["fine-tuning, whole", *size] = lambda size=size: step(model, *size)
        if adapted is not None:
            found["fine-tuning, LoRA", *size] = lambda size=size: step(adapted, *size)
    return found


def agree(model: Any) -> None:
    """Stop unless logits and the gradient of all parameters are the same with and without."""
    ids, sides = tokens(2, 150), []
    for within in (nullcontext, lambda: accelerate(model)):
        with within():
            model.zero_grad()
            output = model(ids, labels=ids)
            output.loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            sides.append((output.logits.detach(), gradient))
        model.zero_grad()
    for a, b in zip(*sides, strict=True):
        error = float((a - b).abs().max() / a.abs().max())
        if not error <= 2e-5:
            raise SystemExit(f"the two sides do not compute the same: off by {error:.1e}")


def main() -> None:
    parser = timing.parser(__doc__, rounds=5, results="gated-delta-models.json")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # transformers says once that its own functions are slow; PEFT what it will rename.
    warnings.simplefilter("ignore")
    has_peft = importlib.util.find_spec("peft") is not None
    rows = []
    for name in options.models.split(","):
        model = build(name)
        agree(model)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{name}: {parameters / 1e6:.0f} million parameters", flush=True)
        adapted = low_rank(model) if has_peft else None
        for (work, n_rows, length), make in works(model, adapted).items():
            whole = adapted if "LoRA" in work else model
            run = make()

            def within(side: str, whole: Any = whole) -> AbstractContextManager[object]:
                return accelerate(whole) if side == "accelerated" else nullcontext()

            sides = {side: run for side in ("plain", "accelerated")}
            times = interleaved(sides, options.rounds, options.seconds, within)
            found = ratio(times["plain"], times["accelerated"])
            speeds = {side: n_rows * length / median(t) for side, t in times.items()}
            rows.append(
                {
                    "model": name,
                    "parameters": parameters,
                    "work": work,
                    "rows": n_rows,
                    "tokens": length,
                    "ratio": vars(found),
                    "tokens_per_second": speeds,
                }
            )
            spread = f"{found.middle:.2f}x ({found.low:.2f} to {found.high:.2f})"
            speed = f"{speeds['plain']:.0f} -> {speeds['accelerated']:.0f} tokens/s"
            print(f"{work}, {n_rows} x {length} tokens: {spread}, {speed}", flush=True)
    timing.write(options.json, rows)


if __name__ == "__main__":
    main()
