"""The targets of the census: functions that make models with state, as initialised, by name."""

from __future__ import annotations

import copy
import functools
import importlib.util
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statelaws import Causal, Claims, Function, Inputs, Recurrent, by_steps
from statelaws.adapters.recipes import CODED, EXPERTS, LATENT, PADDING, RECIPES, SIZES
from statelaws.laws import NAMES
from statelaws.states import mapped

TARGETS: dict[str, Callable[[], Any]] = {}
VOCABULARY = 64


def target(name: str, *options: Any, **named: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that makes a model, with its arguments."""

    def register(make: Callable[..., Any]) -> Any:
        TARGETS[name] = lambda: make(*options, **named)
        return make

    return register


# ----- torch


@target("torch.nn: RNN", nn.RNN)
@target("torch.nn: RNN of relu", nn.RNN, nonlinearity="relu")
@target("torch.nn: GRU", nn.GRU, batch_first=True)
@target("torch.nn: GRU of two layers", nn.GRU, num_layers=2)
@target("torch.nn: LSTM", nn.LSTM)
@target("torch.nn: LSTM of two layers, projected", nn.LSTM, num_layers=2, proj_size=4)
def _(kind: type[nn.RNNBase], **options: Any) -> Any:
    return Recurrent(kind(6, 8, **options))


def loop(cell: nn.Module, n_states: int) -> Any:
    """A cell of torch, step by step."""

    def step(x: torch.Tensor, state: Any) -> Any:
        state = cell(x, state)
        return (state, state) if n_states == 1 else (state[0], state)

    def start(rows: int) -> Any:
        return torch.zeros(rows, 8) if n_states == 1 else (torch.zeros(rows, 8),) * 2

    return Function(by_steps(step), start, Inputs(width=6), cell)


TARGETS["torch.nn: RNNCell"] = lambda: loop(nn.RNNCell(6, 8), 1)
TARGETS["torch.nn: GRUCell"] = lambda: loop(nn.GRUCell(6, 8), 1)
TARGETS["torch.nn: LSTMCell"] = lambda: loop(nn.LSTMCell(6, 8), 2)


# ----- transformers


class Recording(Causal):
    """One whose cache was told to record its past, so that it can be rolled back."""

    def start(self, batch_size: int) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.module.config.get_text_config(decoder=True))
        cache.activate_past_recording()
        return cache, 0, None


OPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_ctx": 512},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 1024},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "biogpt": {}, "jetmoe": {"kv_channels": 8, "num_local_experts": 4},
    "qwen2_moe": EXPERTS, "olmoe": EXPERTS, "granitemoe": EXPERTS, "granitemoeshared": EXPERTS,
    "ernie4_5_moe": EXPERTS, "phimoe": EXPERTS, "minimax_m2": EXPERTS, "hunyuan_v1_moe": EXPERTS,
    "flex_olmo": EXPERTS,
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "deepseek_v2": {**LATENT, "q_lora_rank": 16, "first_k_dense_replace": 1, "n_group": 2,
                    "topk_group": 1},
    "dots1": {**EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
              "first_k_dense_replace": 1},
    "bert": {"is_decoder": True}, "roberta": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 32}, "camembert": {"is_decoder": True},
    "rembert": {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32},
    "roformer": {"is_decoder": True, "embedding_size": 32},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "mem_len": 16},
    "gemma3n_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
                     "laurel_rank": 8, "num_kv_shared_layers": 0, "num_hidden_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"],
                     "activation_sparsity_pattern": [0.0, 0.0]},
}  # fmt: skip
"""Options of types without a recipe, besides those of all."""
LATER = (
    *("arcee", "apertus", "aria_text", "bitnet", "biogpt", "codegen", "cohere", "ctrl", "cwm"),
    *("dbrx", "deepseek_v2", "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("flex_olmo", "gemma", "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt_bigcode"),
    *("gpt_neox_japanese", "gptj", "granite", "granite_swa", "granitemoe", "granitemoeshared"),
    *("helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3"),
    *("jais2", "jetmoe", "laguna", "lara_mini", "longcat_flash", "mellum", "mimo_v2_flash"),
    *("minicpm3", "minimax_m2", "ministral", "ministral3", "modernbert-decoder", "mpt"),
    *("nanochat", "nemotron", "olmo", "olmo3", "olmoe", "persimmon", "phimoe", "qwen2_moe"),
    *("seed_oss", "smollm3", "solar_open", "vaultgemma", "xglm", "youtu", "afmoe", "axk1"),
    *("exaone_moe", "kolibri1", "iquestcoder", "reformer", "xlnet", "bert", "roberta", "electra"),
    *("camembert", "rembert", "roformer", "openai-gpt", "cpmant", "inkling_text"),
    *("inkling2_text", "qwen4_exp_text", "hy_v3", "hy_v4", "flint", "dory", "sarvam_moe"),
    "sarvam_mla",
)
"""Types that statelaws has no recipe for."""


def small(model_type: str) -> nn.Module:
    """A small model of a type, as initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = RECIPES.get(model_type)
    if own is None:
        # A type that has no window would get one in its cache only.
        known = AutoConfig.for_model(model_type).get_text_config(decoder=True)
        common = {"sliding_window": 8, "rope_theta": 1e4, "dropout": 0.0}
        own = {name: value for name, value in common.items() if hasattr(known, name)}
        own |= OPTIONS.get(model_type, {})
    kind = type(AutoConfig.for_model(model_type))
    derived = {n for n in SIZES if isinstance(getattr(kind, n, None), property)}
    sizes = {n: size for n, size in SIZES.items() if n not in derived}
    config = AutoConfig.for_model(model_type, **{"vocab_size": VOCABULARY, **sizes, **own})
    module: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return module


def of_type(model_type: str) -> Any:
    from transformers import DynamicCache

    module = small(model_type)
    claims = (CODED.get(model_type), PADDING.get(model_type))
    model: Any = Causal(module, *claims)
    if model_type not in RECURRENT:
        # A cache of keys grows, and what is longest to try says little of it.
        model.laws = [law for law in NAMES if law not in ("bounded", "long-run", "gradients")]
        model.budget = 2.5
    elif hasattr(DynamicCache, "activate_past_recording"):
        model.recording = lambda: Recording(module, *claims)
    return model


RECURRENT = [*RECIPES][[*RECIPES].index("mamba") :]
for each in (*RECURRENT, *LATER, *(name for name in RECIPES if name not in RECURRENT)):
    TARGETS[f"transformers: {each}"] = lambda each=each: of_type(each)


# ----- lucidrains: x-transformers, minGRU-pytorch, recurrent-memory-transformer, titans-pytorch


CACHED = Claims(bounded=False, carries_gradients=False)


class WholeText(Function):
    """A model that is given the whole text so far with its cache, and decodes one token at a time.

    ``called(tokens, cache=...)``, and ``first`` where there is no cache yet, give outputs and a cache.
    """

    def __init__(self, module: Any, called: Any, first: Any = None, claims: Any = CACHED) -> None:
        def step(token: torch.Tensor, state: Any) -> Any:
            tokens = torch.cat([state[0], token[:, None]], 1)
            y, cache = called(tokens, cache=state[1])
            return y[:, -1], (tokens, cache)

        def read(tokens: torch.Tensor, state: Any) -> Any:
            if state[1] is not None:
                return by_steps(step)(tokens, state)
            y, cache = (first or called)(tokens, cache=None)
            return y, (tokens, cache)

        start = lambda rows: (torch.zeros(rows, 0, dtype=torch.long), None)  # noqa: E731
        super().__init__(read, start, Inputs(vocab_size=VOCABULARY), module.eval(), claims)

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        n = len(state[0])
        return mapped(lambda part: part[rows] if part.dim() and len(part) == n else part, state)


def x_decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=32, **options)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=512, attn_layers=layers)


def x_transformer(**options: Any) -> Any:
    module: Any = x_decoder(**options)

    def called(tokens: torch.Tensor, cache: Any) -> Any:
        # As its generate does.
        kept = cache if module.can_cache_kv else None
        return module(tokens, cache=kept, return_intermediates=True)

    return WholeText(module, called)


for text, options in {
    "absolute positions": {},
    "rotary": {"rotary_pos_emb": True},
    "xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 4},
    "relative positions of T5": {"rel_pos_bias": True},
    "dynamic positions": {"dynamic_pos_bias": True},
    "contextual positions": {"attn_use_cope": True, "attn_cope_max_pos": 64},
    "one head of keys": {"attn_one_kv_head": True, "rotary_pos_emb": True},
    "flash": {"attn_flash": True, "rotary_pos_emb": True},
    "shifted tokens": {"shift_tokens": 1, "rotary_pos_emb": True},
    "talking heads": {"attn_pre_talking_heads": True, "rotary_pos_emb": True},
    "memory of keys": {"attn_num_mem_kv": 4, "rotary_pos_emb": True},
    "residual values": {"add_value_residual": True, "rotary_pos_emb": True},
    "forgetting": {"attn_data_dependent_alibi": True},
    "gated residuals": {"gate_residual": True, "rotary_pos_emb": True},
    "hyper-connections": {"num_residual_streams": 2, "rotary_pos_emb": True},
}.items():
    TARGETS[f"x-transformers: {text}"] = lambda options=options: x_transformer(**options)


@target("x-transformers: memories of Transformer-XL", rel_pos_bias=True)
@target("x-transformers: memories, rotary", rotary_pos_emb=True)
@target("x-transformers: memories, alibi", alibi_pos_bias=True)
def _(**options: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=32, **options)
    # Absolute positions would begin anew with every segment.
    module = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=256,
        max_mem_len=16,
        attn_layers=layers,
        use_abs_pos_emb=False,
    ).eval()

    def read(x: torch.Tensor, mems: Any) -> Any:
        return module(x, mems=mems or None, return_mems=True)

    claims = Claims(cuts=False, carries_gradients=False, lengths={"memory": 16})
    return Function(read, lambda rows: [], Inputs(vocab_size=VOCABULARY), module, claims)


@target("minGRU-pytorch: minGRU", "minGRU")
@target("minGRU-pytorch: minGRU, wider", "minGRU", expansion_factor=1.5)
@target("minGRU-pytorch: minLSTM", "minLSTM")
def _(name: str, **options: Any) -> Any:
    import importlib

    module = getattr(importlib.import_module(f"minGRU_pytorch.{name}"), name)(dim=8, **options)

    def read(x: torch.Tensor, state: Any) -> Any:
        return module(x, prev_hidden=state, return_next_prev_hidden=True)

    return Function(read, lambda rows: None, Inputs(width=8), module)


@target("minGRU-pytorch: minLM", False)
@target("minGRU-pytorch: minLM of minLSTM", True)
def _(use_lstm: bool) -> Any:
    from minGRU_pytorch.minLM import minLM

    module = minLM(num_tokens=VOCABULARY, dim=16, depth=2, use_lstm=use_lstm)

    def called(tokens: torch.Tensor, cache: Any) -> Any:
        return module(tokens, return_prev_hiddens=True, prev_hiddens=cache)

    return WholeText(module, called)


def rmt(seq_len: int, use_xl_memories: bool) -> nn.Module:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return RecurrentMemoryTransformer(
        dim=32, num_tokens=VOCABULARY, depth=2, num_memory_tokens=3, seq_len=seq_len, dim_head=16,
        heads=2, xl_mem_len=8, num_residual_streams=1, use_xl_memories=use_xl_memories,
    )  # fmt: skip


def of_rmt(module: nn.Module, read: Any, claims: Claims) -> Any:
    """State: memories ``[B, m, d]``, and keys and values ``[2, B, ...]`` of each layer."""
    dimension = lambda part: 0 if part.dim() == 3 else 1  # noqa: E731
    inputs = Inputs(vocab_size=VOCABULARY)
    return Function(read, lambda rows: (None, None), inputs, module, claims, dimension)


@target("recurrent-memory-transformer", False)
@target("recurrent-memory-transformer: memories of Transformer-XL", True)
def _(use_xl_memories: bool) -> Any:
    module = rmt(256, use_xl_memories)

    def read(x: torch.Tensor, state: Any) -> Any:
        y, memories, xl = module(x, state[0], xl_memories=state[1])
        return y, (memories, xl)

    return of_rmt(module, read, Claims(cuts=False))


@target("recurrent-memory-transformer: the wrapper of segments")
def _() -> Any:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformerWrapper

    module = rmt(8, True)
    wrapper = RecurrentMemoryTransformerWrapper(module)

    def read(x: torch.Tensor, state: Any) -> Any:
        """Several segments as in training, and one as while sampling."""
        memories, xl = state
        several = wrapper(x, memories, xl_memories=xl)[0] if x.shape[1] > 8 else None
        outputs = []
        for segment in x.split(8, 1):
            y, memories, xl = module(segment, memories, xl_memories=xl)
            outputs.append(y)
        return torch.cat(outputs, 1) if several is None else several, (memories, xl)

    return of_rmt(wrapper, read, Claims(cuts=8, lengths={"segment": 8}))


class OfTitans(Function):
    """Weights, updates and momentum of each row and head, in TensorDicts."""

    enlarge = False

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        heads = self.module.heads
        each = (rows[:, None] * heads + torch.arange(heads)).flatten()
        last, momentum = state.states
        if momentum is not None:
            momentum = momentum.apply(lambda part: part[:, each])
        return state._replace(
            weights=state.weights.apply(lambda part: part[each]),
            cache_store_segment=state.cache_store_segment[rows],
            states=(last.apply(lambda part: part[each]), momentum),
            updates=state.updates.apply(lambda part: part[each]),
        )

    def copy(self, state: Any) -> Any:
        return copy.deepcopy(state)


def neural_memory(chunk: int, options: dict[str, Any]) -> nn.Module:
    from titans_pytorch import NeuralMemory

    return NeuralMemory(dim=16, chunk_size=chunk, **options)


@target("titans-pytorch: NeuralMemory, chunks of one", 1, {})
@target("titans-pytorch: NeuralMemory, chunks of four", 4, {})
@target("titans-pytorch: NeuralMemory, two heads", 1, {"heads": 2, "dim_head": 8})
@target("titans-pytorch: NeuralMemory, weights updated every eight", 1, {"batch_size": 8})
@target("titans-pytorch: NeuralMemory without momentum", 1, {"momentum": False})
def _(chunk: int, options: dict[str, Any]) -> Any:
    module = neural_memory(chunk, options)
    claims = Claims(cuts=chunk)
    return OfTitans(
        lambda x, state: module(x, state=state), lambda rows: None, Inputs(width=16), module, claims
    )


def mac() -> nn.Module:
    from titans_pytorch import MemoryAsContextTransformer

    return MemoryAsContextTransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, segment_len=8, num_persist_mem_tokens=2,
        num_longterm_mem_tokens=2, dim_head=16, heads=2, neural_memory_layers=(2,),
        neural_memory_segment_len=4, num_residual_streams=1,
    ).eval()  # fmt: skip


@target("titans-pytorch: MAC transformer")
def _() -> Any:
    module: Any = mac()

    called = functools.partial(module, return_cache=True)

    def first(tokens: torch.Tensor, cache: Any) -> Any:
        """All logits by one call, and the cache by single tokens, which is how the model samples."""
        for stop in range(1, tokens.shape[1] + 1):
            _, cache = called(tokens[:, :stop], cache=cache)
        return module(tokens), cache

    return WholeText(module, called, first, replace(CACHED, lengths={"segment": 8}))


# ----- xlstm


def xlstm(both: bool) -> nn.Module:
    from xlstm import (
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMLMModel,
        xLSTMLMModelConfig,
    )  # fmt: skip

    layer = mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    slstm = sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4)
    block = sLSTMBlockConfig(slstm=slstm, feedforward=FeedForwardConfig())
    module = xLSTMLMModel(
        xLSTMLMModelConfig(
            vocab_size=VOCABULARY, context_length=256, num_blocks=2, embedding_dim=32,
            mlstm_block=mLSTMBlockConfig(mlstm=layer), slstm_block=block if both else None,
            slstm_at=[1] if both else [],
        )
    )  # fmt: skip
    module.reset_parameters()
    return module.eval()


@target("xlstm: mLSTM", False)
@target("xlstm: mLSTM and sLSTM", True)
def _(both: bool) -> Any:
    module: Any = xlstm(both)

    def turned(state: Any) -> Any:
        """sLSTM's four states come before the rows."""
        return state and {
            block: {n: v.transpose(0, 1) if n == "slstm_state" else v for n, v in parts.items()}
            for block, parts in state.items()
        }

    def step(tokens: torch.Tensor, state: Any) -> Any:
        y, state = module.step(tokens[:, None], state=turned(state))
        return y[:, 0], turned(state)

    def read(tokens: torch.Tensor, state: Any) -> Any:
        """A whole text at once, or on from a state in single steps."""
        y, after = by_steps(step)(tokens, state)
        return module(tokens) if state is None and tokens.shape[1] > 1 else y, after

    claims = Claims(consumes_state=True, lengths={"convolution": 4})
    inputs = Inputs(vocab_size=VOCABULARY)
    model: Any = Function(read, lambda rows: None, inputs, module, claims)
    model.budget = 10
    return model


# ----- fla: the operations' references, which run without Triton


GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k": functools.partial(nn.functional.normalize, dim=-1),
    "beta": torch.sigmoid,
    "g": nn.functional.logsigmoid,
    "gk": nn.functional.logsigmoid,
}


class OfFla(nn.Module):
    """A layer of two heads around an operation; gates in its logarithms, strengths below one."""

    def __init__(self, operation: Any, gates: dict[str, int], heads_first: bool) -> None:
        super().__init__()
        self.operation = operation
        self.heads_first = heads_first
        widths = {"q": 4, "k": 4, "v": 4, **gates}
        self.projections = nn.ModuleDict({n: nn.Linear(8, 2 * w) for n, w in widths.items()})

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        given = {}
        for name, projection in self.projections.items():
            part = projection(x).unflatten(-1, (2, -1))
            part = GATES.get(name, torch.clone)(part).squeeze(-1)
            given[name] = part.transpose(1, 2) if self.heads_first else part
        y, state = self.operation(**given, initial_state=state, output_final_state=True)
        return (y.transpose(1, 2) if self.heads_first else y).flatten(2), state


def reference(folder: str, name: str, chunk: int) -> Any:
    """An operation's reference. The package imports Triton's, which takes longer than all laws."""
    place = importlib.util.find_spec("fla")
    assert place
    assert place.submodule_search_locations
    path = Path(place.submodule_search_locations[0], "ops", folder, "naive.py")
    operations = runpy.run_path(str(path))
    operation = operations.get(name) or operations[f"naive_{name}"]
    return functools.partial(operation, chunk_size=chunk) if chunk else operation


@target("fla: gated delta rule", "gated_delta_rule", "recurrent_gated_delta_rule", g=1, beta=1)
@target(
    "fla: gated delta rule, chunks", "gated_delta_rule", "chunk_gated_delta_rule", 8, g=1, beta=1
)
@target("fla: gated linear attention", "gla", "recurrent_gla", gk=4)
@target("fla: simple gated linear attention", "simple_gla", "recurrent_simple_gla", g=1)
@target("fla: simple gated linear attention, chunks", "simple_gla", "chunk_simple_gla", 8, g=1)
@target("fla: Kimi delta attention", "kda", "recurrent_kda", g=4, beta=1)
@target("fla: delta rule", "delta_rule", "delta_rule_recurrence", beta=1)
def _(folder: str, name: str, chunk: int = 0, **gates: int) -> Any:
    module = OfFla(reference(folder, name, chunk), gates, folder == "delta_rule")
    claims = Claims(lengths={"chunk": chunk} if chunk else {})
    return Function(module, lambda rows: None, Inputs(width=8), module, claims)


# ----- Reinforcement learning


@target("torchrl: LSTMModule", "LSTMModule", ("h", "c"))
@target("torchrl: GRUModule", "GRUModule", ("h",))
def _(kind: str, names: tuple[str, ...]) -> Any:
    return OfTorchRL(of_torchrl(kind, names), names)


def of_torchrl(kind: str, names: tuple[str, ...]) -> nn.Module:
    from torchrl import modules

    after = [("next", name) for name in names]
    keys = {"in_keys": ["obs", *names], "out_keys": ["out", *after]}
    module: nn.Module = getattr(modules, kind)(input_size=4, hidden_size=8, **keys)
    return module


class OfTorchRL(Function):
    """Steps while acting, and whole windows in recurrent mode."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.names = names

        def first(rows: int) -> Any:
            return tuple(torch.zeros(rows, 1, 8) for _ in names)

        super().__init__(by_steps(self.called), first, Inputs(width=4), module)

    def called(self, x: torch.Tensor, state: Any, new: torch.Tensor | None = None) -> Any:
        from tensordict import TensorDict

        new = torch.zeros(len(x), dtype=torch.bool) if new is None else new
        data = dict(zip(self.names, state, strict=True), obs=x, is_init=new[..., None])
        done = self.module(TensorDict(data, new.shape))
        return done["out"], tuple(done["next", name] for name in self.names)

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        from torchrl.modules import set_recurrent_mode

        # As an environment stores them: zeros where an episode begins.
        each_step = [part[:, None].expand(*starts.shape, -1, -1) for part in state]
        stored = [torch.where(starts[..., None, None], 0.0, part) for part in each_step]
        with set_recurrent_mode(True):
            y, states = self.called(inputs, stored, starts)
        return y, tuple(part[:, -1] for part in states)

    def replay(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.read_packed(inputs, state, starts)[0]
        return y


@target("sb3-contrib: RecurrentActorCriticPolicy")
def _() -> Any:
    return OfSB3(sb3_policy())


def sb3_policy() -> nn.Module:
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

    return RecurrentActorCriticPolicy(
        Box(-np.inf, np.inf, (4,), np.float32), Discrete(3), lambda _: 1e-3, lstm_hidden_size=8,
        enable_critic_lstm=False, shared_lstm=True,
    )  # fmt: skip


class OfSB3(Function):
    """The values of a recurrent policy: many steps as in training, single ones as in acting."""

    def __init__(self, policy: nn.Module) -> None:
        def read(x: torch.Tensor, state: Any) -> Any:
            return self.read_packed(x, state, torch.zeros(x.shape[:2], dtype=torch.bool))

        def first(rows: int) -> Any:
            return (torch.zeros(1, rows, 8),) * 2

        claims = Claims(carries_gradients=False)
        super().__init__(read, first, Inputs(width=4), policy, claims, batch_dimension=1)

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        policy: Any = self.module
        features = policy.extract_features(inputs.flatten(0, 1))
        starts = starts.float().flatten()
        y, state = policy._process_sequence(features, state, starts, policy.lstm_actor)
        values = policy.value_net(policy.mlp_extractor.forward_critic(y))
        return values.unflatten(0, inputs.shape[:2]), state


# ----- memax, by JAX


class OfJax(Function):
    """A model of equinox, whose weights are parameters here; arrays go over by dlpack."""

    # Each shape of inputs is compiled anew, which takes most of the time.
    laws = ("repeatable", "cuts", "causality", "rows", "values", "fresh-start")
    budget = 12

    def __init__(self, model: Any) -> None:
        import equinox
        import jax

        weights, self.rest = equinox.partition(model, equinox.is_inexact_array)
        leaves, self.tree = jax.tree.flatten(weights)
        module = nn.ParameterList([nn.Parameter(to_torch(leaf)) for leaf in leaves])

        def first(rows: int) -> Any:
            carry = jax.tree.map(to_torch, model.initialize_carry())
            return jax.tree.map(lambda part: part.expand(rows, *part.shape).clone(), carry)

        def read(x: torch.Tensor, state: Any) -> Any:
            return self.read_packed(x, state, torch.zeros(x.shape[:2], dtype=torch.bool))

        self.rows = equinox.filter_jit(jax.vmap(self.row, in_axes=(None, 0, 0, 0)))
        claims = Claims(carries_gradients=False)
        super().__init__(read, first, Inputs(width=4), module, claims)

    def row(self, weights: Any, state: Any, x: Any, starts: Any) -> Any:
        import equinox

        model = equinox.combine(weights, self.rest)
        states, y = model(state, (x, starts))
        return y, model.latest_recurrent_state(states)

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        import jax

        weights = jax.tree.unflatten(self.tree, self.module)
        arrays = jax.tree.map(to_jax, (weights, state, inputs, starts))
        return jax.tree.map(to_torch, self.rows(*arrays))


def to_jax(tensor: torch.Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: Any) -> torch.Tensor:
    return torch.from_dlpack(array).clone()


def of_memax(name: str) -> Any:
    import jax
    from memax.equinox.train_utils import get_residual_memory_model

    return OfJax(get_residual_memory_model(name, 4, 16, 5, num_layers=1, key=jax.random.key(0)))


for each in ("GRU", "LRU", "FFM", "DeltaNet", "Attention-RoPE", "S6"):
    TARGETS[f"memax: {each}"] = lambda each=each: of_memax(each)


# ----- memspan


def of_memspan(name: str) -> Any:
    from architectures import CASES
    from memspan.lab.carries_memory import CarriesMemory

    model: Any = CarriesMemory(CASES[name].with_options(n_layers=1).model(torch.float32))
    model.enlarge = False
    return model


for each in ("feedback", "compressive", "xl-fixed", "fast-delta", "gated", "mamba", "rwkv", "rmt"):
    TARGETS[f"memspan: {each}"] = lambda each=each: of_memspan(each)


def by_turns(targets: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """One of each library after the other, so that a census that was stopped has some of all; of a
    library with many kinds of one model, the later ones at the end."""
    seen: Counter[str] = Counter()
    turns = {}
    for name in targets:
        library = name.partition(":")[0]
        late = seen[library] > 6 and library != "transformers"
        turns[name] = seen[library] + 1000 * late
        seen[library] += 1
    return dict(sorted(targets.items(), key=lambda item: turns[item[0]]))


TARGETS = by_turns(TARGETS)
