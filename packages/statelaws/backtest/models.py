"""The models of bugs.toml, as each release makes them; run.py runs this in the release's environment.

python backtest/models.py ID SIDE [LAW ...]     SIDE: faulty or fixed; prints what was found, as JSON
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

import others
import replanted
from registry import MODELS, VOCABULARY, Make, bug
from statelaws import Causal, Claims, Inputs, check
from statelaws.adapters.recipes import RECIPES, SIZES, build, randomise
from statelaws.states import mapped

assert others
assert replanted


def types(name: str, *model_types: str) -> None:
    """A bug that small models of these types have as they are."""
    MODELS[name] = lambda: {each: lambda each=each: build(each) for each in model_types}


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1]
    found = {}
    replanted.SIDE = sys.argv[2]
    for model, make in MODELS[name]().items():
        started = time.process_time()
        try:
            report = check(make(), sys.argv[3:] or None)
            findings = [asdict(finding) for finding in report.findings]
        except Exception as error:
            findings = [
                {"law": "all", "outcome": "refused", "detail": f"{type(error).__name__}: {error}"}
            ]
        for finding in findings:
            finding.pop("script", None)
            if isinstance(finding.get("difference"), float):
                finding["difference"] = float(f"{min(finding['difference'], 1e9):.2g}")
                finding["floor"] = float(f"{finding['floor'] or 0:.2g}")
        found[model] = {"findings": findings, "seconds": round(time.process_time() - started, 1)}
    packages = ("torch", "transformers", "x-transformers", "flash-linear-attention", "torchrl")
    versions = {each: version for each in packages if (version := _version(each))}
    print(json.dumps({"versions": versions, "models": found}))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ----- transformers


types("mamba2-second-segment", "mamba2")
types("gated-delta-second-segment", "qwen3_next", "olmo_hybrid")
types("mamba2-hybrids-second-segment", "zamba2", "bamba")
types("inter-chunk-recurrence", "nemotron_h", "zamba2")
types("bamba-groups", "bamba")
types("beams-without-reordering", "mamba")


@bug("padding-of-later-segments")
def _() -> dict[str, Make]:
    def make() -> Any:
        model = build("qwen3_next")
        # The repair promises it.
        model.claims = replace(
            model.claims, padding=frozenset({"right-last", "left", "left-continued"})
        )
        return model

    return {"qwen3_next": make}


def causal(model_type: str, options: dict[str, Any], kind: type[Causal] = Causal) -> Any:
    """A small model of a type, with options of its own."""
    return kind(made(model_type, options))


@bug("dynamic-rope-stays-scaled")
def _() -> dict[str, Make]:
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}
    scaled["pad_token_id"] = 0
    return {"llama": lambda: causal("llama", scaled)}


@bug("dynamic-rope-no-reset")
def _() -> dict[str, Make]:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    options = {"rope_parameters": rope, "max_position_embeddings": 16}
    return {"llama": lambda: causal("llama", options)}


@bug("doge-sees-the-future")
def _() -> dict[str, Make]:
    return {"doge": lambda: causal("doge", {"attn_implementation": "sdpa"})}


class Cached:
    """A causal language model with a cache that is made beforehand."""

    inputs = Inputs(vocab_size=VOCABULARY)

    def __init__(
        self, module: nn.Module, cache: Callable[[nn.Module, int], Any], chunked: bool = False
    ) -> None:
        self.module = module
        self.cache = cache
        self.parameters = inspect.signature(module.forward).parameters
        window = module.config.attention_chunk_size if chunked else module.config.sliding_window
        self.claims = Claims(
            consumes_state=True, bounded=False, carries_gradients=False, lengths={"window": window}
        )

    def start(self, batch_size: int) -> Any:
        return self.cache(self.module, batch_size), 0

    def read(self, inputs: Tensor, state: Any) -> Any:
        cache, length = state
        after = length + inputs.shape[1]
        places = torch.arange(length, after)
        options = {
            "past_key_values": cache,
            "cache": cache,
            "cache_position": places,
            "attention_mask": inputs.new_ones(len(inputs), after),
            "position_ids": places[None].expand(len(inputs), -1),
        }
        options = {name: value for name, value in options.items() if name in self.parameters}
        output = self.module(input_ids=inputs, use_cache=True, **options)
        return output.logits, (cache, after)

    def select(self, state: Any, rows: Tensor) -> Any:
        state[0].reorder_cache(rows)
        return state

    def copy(self, state: Any) -> Any:
        return deepcopy(state)


class Recording(Cached):
    """Its cache records its past, as speculative decoding has it do, so that it can be rolled back."""

    def truncate(self, state: Any, n: int) -> Any:
        state[0].crop(-n)
        return state[0], state[1] - n


def recording(module: nn.Module, batch_size: int) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=module.config)
    cache.activate_past_recording()
    return cache


@bug("sliding-cache-that-records")
def _() -> dict[str, Make]:
    def make() -> Any:
        return Recording(causal("mistral", {"sliding_window": 8}).module, recording)

    return {"mistral": make}


def static(module: nn.Module, batch_size: int, kind: Any = None) -> Any:
    import transformers

    kind = kind or getattr(transformers, "HybridCache", None) or transformers.StaticCache
    names = inspect.signature(kind.__init__).parameters
    sizes = {"max_cache_len": 300, "max_batch_size": batch_size, "dtype": torch.float32}
    return kind(module.config, **{name: size for name, size in sizes.items() if name in names})


@bug("sliding-static-cache")
def _() -> dict[str, Make]:
    return {"gemma2": lambda: Cached(made("gemma2", {"sliding_window": 8}), static)}


def made(model_type: str, options: dict[str, Any]) -> nn.Module:
    """A small model of a type whose own cache cannot be probed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{"vocab_size": VOCABULARY, **SIZES, **options})
    module = AutoModelForCausalLM.from_config(config).eval()
    randomise(module, 0)
    return module


@bug("llama4-chunks")
def _() -> dict[str, Make]:
    def chunks(module: nn.Module, batch_size: int) -> Any:
        from transformers.cache_utils import HybridChunkedCache

        return static(module, batch_size, HybridChunkedCache)

    def make() -> Any:
        module = made("llama4_text", RECIPES["llama4_text"])
        for name, weight in module.named_parameters():
            if name.endswith("_proj"):
                # Experts' weights, which these releases leave as memory had them.
                nn.init.normal_(weight, 0, weight.shape[1] ** -0.5)
        return Cached(module, chunks, chunked=True)

    return {"llama4_text": make}


class Streamed:
    """Mimi's encoder over frames of audio; outputs are what it rounds to codes."""

    def __init__(self) -> None:
        from transformers import MimiConfig, MimiModel

        torch.manual_seed(0)
        config = MimiConfig(
            hidden_size=32, num_filters=8, upsampling_ratios=[2], codebook_size=16, codebook_dim=8,
            num_quantizers=2, vector_quantization_hidden_dimension=8, upsample_groups=32,
            num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
            sliding_window=8, layer_scale_initial_scale=1.0,
        )  # fmt: skip
        self.module: Any = MimiModel(config).eval()
        randomise(self.module, 0)
        self.module.downsample.register_forward_hook(self._keep)
        self.inputs = Inputs(width=1, per_output=4)
        self.claims = Claims(consumes_state=True, bounded=False, carries_gradients=False)

    def _keep(self, module: nn.Module, given: Any, result: Tensor) -> None:
        self.kept = result

    def start(self, batch_size: int) -> Any:
        return None, None

    def read(self, inputs: Tensor, state: Any) -> Any:
        cache, padding = state
        output = self.module.encode(
            inputs.transpose(1, 2), encoder_past_key_values=cache, padding_cache=padding,
            use_streaming=True, return_dict=True,
        )  # fmt: skip
        state = output.encoder_past_key_values, output.padding_cache
        return self.kept.transpose(1, 2), state

    def select(self, state: Any, rows: Tensor) -> Any:
        return mapped(lambda part: part[rows] if part.dim() > 1 else part, state)

    def copy(self, state: Any) -> Any:
        return deepcopy(state)


@bug("mimi-streaming-encoder")
def _() -> dict[str, Make]:
    return {"mimi's encoder": Streamed}


class Packed:
    """Packed documents are told apart by seq_idx, and by positions that begin anew.

    Its state are the tokens of the document so far, which are read again.
    """

    claims = Claims(bounded=False, carries_gradients=False)
    inputs = Inputs(vocab_size=VOCABULARY)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def start(self, batch_size: int) -> Any:
        return [torch.zeros(1, 0, dtype=torch.long) for _ in range(batch_size)]

    def read(self, inputs: Tensor, state: Any) -> Any:
        return self.read_packed(inputs, state, torch.zeros_like(inputs, dtype=torch.bool))

    def read_packed(self, inputs: Tensor, state: Any, starts: Tensor) -> Any:
        outputs = []
        after = []
        n = inputs.shape[1]
        for row, before in enumerate(state):
            tokens = torch.cat([before, inputs[row : row + 1]], 1)
            new = torch.cat([torch.zeros(before.shape[1]).bool(), starts[row]])
            places = torch.arange(tokens.shape[1])
            first = torch.where(new, places, 0).cummax(0).values
            output = self.module(
                input_ids=tokens,
                position_ids=(places - first)[None],
                seq_idx=new.cumsum(0).int()[None],
                use_cache=False,
            )
            outputs.append(output.logits[:, -n:])
            after.append(tokens[:, first[-1] :])
        return torch.cat(outputs), after

    def select(self, state: Any, rows: Tensor) -> Any:
        return [state[row] for row in rows.tolist()]

    def copy(self, state: Any) -> Any:
        return [each.clone() for each in state]


@bug("short-convolution-across-documents")
def _() -> dict[str, Make]:
    options = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}
    return {"lfm2": lambda: Packed(causal("lfm2", options).module)}


@bug("mamba-left-padding")
def _() -> dict[str, Make]:
    return {"mamba": lambda: mamba_one("mamba"), "falcon_mamba": lambda: mamba_one("falcon_mamba")}


@bug("mamba2-slow-path")
def _() -> dict[str, Make]:
    return {"mamba2": lambda: mamba_one("mamba2", **RECIPES["mamba2"])}


def mamba_one(model_type: str, **own: Any) -> Any:
    """A small mamba that reads one segment: later ones are single tokens in these releases."""
    return OneByOne(made(model_type, {"state_size": 8, "time_step_rank": 4, **own}))


class OneByOne:
    """A first segment of any length, and single tokens after it, which stand for later segments."""

    claims = Claims(padding=frozenset({"left"}), consumes_state=True, carries_gradients=False)
    inputs = Inputs(vocab_size=VOCABULARY)

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = inspect.signature(module.forward).parameters

    def start(self, batch_size: int) -> Any:
        return None, 0

    def read(self, inputs: Tensor, state: Any, mask: Tensor | None = None) -> Any:
        cache, length = state
        if length and inputs.shape[1] > 1:
            outputs = []
            for t in range(inputs.shape[1]):
                y, state = self.read(inputs[:, t : t + 1], state)
                outputs.append(y)
            return torch.cat(outputs, 1), state
        options: dict[str, Any] = {"cache_params": cache, "use_cache": True}
        if "cache_position" in self.parameters:
            # As generate counts: from the kernel's length on.
            kernel = self.module.config.conv_kernel
            after = torch.tensor([kernel + length])
            options["cache_position"] = after if length else torch.arange(kernel)
        if mask is not None and "attention_mask" in self.parameters:
            options["attention_mask"] = mask
        output = self.module(input_ids=inputs, **options)
        return output.logits, (output.cache_params, length + inputs.shape[1])

    def read_padded(self, inputs: Tensor, state: Any, lengths: Tensor, side: str) -> Any:
        return self.read(
            inputs, state, (torch.arange(inputs.shape[1]).flip(0) < lengths[:, None]).long()
        )

    def select(self, state: Any, rows: Tensor) -> Any:
        cache, length = self.copy(state)
        if cache is None:
            return cache, length
        for name in ("conv_states", "ssm_states"):
            value = getattr(cache, name)
            if isinstance(value, Tensor):
                setattr(cache, name, value[:, rows])
            else:
                layers = value if isinstance(value, dict) else range(len(value))
                setattr(cache, name, {i: value[i][rows] for i in layers})
        return cache, length

    def copy(self, state: Any) -> Any:
        return deepcopy(state)


types("jamba-left-padding", "jamba")


if __name__ == "__main__":
    main()
