"""The targets of the census: functions that make models with state, as initialised, by name."""

from __future__ import annotations

import copy
import importlib.util
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statelaws import Causal, Claims, Function, Inputs, Recurrent
from statelaws.adapters.recipes import CODED, EXPERTS, LATENT, PADDING, RECIPES, SIZES
from statelaws.laws import NAMES
from statelaws.states import copied, mapped

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

    def read(x: torch.Tensor, state: Any) -> Any:
        outputs = []
        for t in range(x.shape[1]):
            state = cell(x[:, t], state)
            outputs.append(state if n_states == 1 else state[0])
        return torch.stack(outputs, 1), state

    def start(rows: int) -> Any:
        return torch.zeros(rows, 8) if n_states == 1 else (torch.zeros(rows, 8),) * 2

    return Function(read, start, Inputs(width=6), cell)


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


def of_type(model_type: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

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
    module = AutoModelForCausalLM.from_config(config).eval()
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


class WholeText:
    """A model that is given the whole text so far with its cache, and decodes one token at a time."""

    def __init__(self, module: nn.Module, first: Any, later: Any, lengths: Any = None) -> None:
        self.module = module.eval()
        self.first = first
        self.later = later
        self.inputs = Inputs(vocab_size=VOCABULARY)
        self.claims = Claims(bounded=False, carries_gradients=False, lengths=lengths or {})

    def start(self, batch_size: int) -> Any:
        return torch.zeros(batch_size, 0, dtype=torch.long), None

    def read(self, inputs: torch.Tensor, state: Any) -> Any:
        before, cache = state
        tokens = torch.cat([before, inputs], 1)
        if cache is None:
            y, cache = self.first(tokens)
            return y, (tokens, cache)
        outputs = []
        for stop in range(before.shape[1] + 1, tokens.shape[1] + 1):
            y, cache = self.later(tokens[:, :stop], cache)
            outputs.append(y[:, -1:])
        return torch.cat(outputs, 1), (tokens, cache)

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        n = len(state[0])
        return mapped(lambda part: part[rows] if part.dim() and len(part) == n else part, state)

    def copy(self, state: Any) -> Any:
        return copied(state)


def x_transformer(**options: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=32, **options)
    module = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=512, attn_layers=layers)

    def first(tokens: torch.Tensor) -> Any:
        return module(tokens, return_intermediates=True)

    def later(tokens: torch.Tensor, cache: Any) -> Any:
        # As its generate does.
        kept = cache if module.can_cache_kv else None
        return module(tokens, cache=kept, return_intermediates=True)

    return WholeText(module, first, later)


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

    def first(tokens: torch.Tensor) -> Any:
        return module(tokens, return_prev_hiddens=True)

    def later(tokens: torch.Tensor, cache: Any) -> Any:
        return module(tokens, return_prev_hiddens=True, prev_hiddens=cache)

    return WholeText(module, first, later)


class OfRMT(Function):
    """Memories ``[B, ...]``, and keys and values ``[2, B, ...]`` of each layer."""

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        memories, xl = state
        if memories is None:
            return state
        return memories[rows], xl and [part[:, rows] for part in xl]


@target("recurrent-memory-transformer", use_xl_memories=False)
@target("recurrent-memory-transformer: memories of Transformer-XL", use_xl_memories=True)
def _(**options: Any) -> Any:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    module = RecurrentMemoryTransformer(
        dim=32, num_tokens=VOCABULARY, depth=2, num_memory_tokens=3, seq_len=256, dim_head=16,
        heads=2, xl_mem_len=8, num_residual_streams=1, **options,
    )  # fmt: skip

    def read(x: torch.Tensor, state: Any) -> Any:
        memories, xl = state
        y, memories, xl = module(x, memories, xl_memories=xl)
        return y, (memories, xl)

    claims = Claims(cuts=False)
    return OfRMT(read, lambda rows: (None, None), Inputs(vocab_size=VOCABULARY), module, claims)


@target("recurrent-memory-transformer: the wrapper of segments")
def _() -> Any:
    from recurrent_memory_transformer_pytorch import (
        RecurrentMemoryTransformer,
        RecurrentMemoryTransformerWrapper,
    )

    module = RecurrentMemoryTransformer(
        dim=32, num_tokens=VOCABULARY, depth=2, num_memory_tokens=3, seq_len=8, dim_head=16,
        heads=2, xl_mem_len=8, num_residual_streams=1, use_xl_memories=True,
    )  # fmt: skip
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

    claims = Claims(cuts=8, lengths={"segment": 8})
    return OfRMT(read, lambda rows: (None, None), Inputs(vocab_size=VOCABULARY), wrapper, claims)


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


@target("titans-pytorch: NeuralMemory, chunks of one", 1, {})
@target("titans-pytorch: NeuralMemory, chunks of four", 4, {})
@target("titans-pytorch: NeuralMemory, two heads", 1, {"heads": 2, "dim_head": 8})
@target("titans-pytorch: NeuralMemory, weights updated every eight", 1, {"batch_size": 8})
@target("titans-pytorch: NeuralMemory without momentum", 1, {"momentum": False})
def _(chunk: int, options: dict[str, Any]) -> Any:
    from titans_pytorch import NeuralMemory

    module = NeuralMemory(dim=16, chunk_size=chunk, **options)
    return OfTitans(
        lambda x, state: module(x, state=state),
        lambda rows: None,
        Inputs(width=16),
        module,
        Claims(cuts=chunk if chunk > 1 else True),
    )


@target("titans-pytorch: MAC transformer")
def _() -> Any:
    from titans_pytorch import MemoryAsContextTransformer

    module = MemoryAsContextTransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, segment_len=8, num_persist_mem_tokens=2,
        num_longterm_mem_tokens=2, dim_head=16, heads=2, neural_memory_layers=(2,),
        neural_memory_segment_len=4, num_residual_streams=1,
    ).eval()  # fmt: skip

    def later(tokens: torch.Tensor, cache: Any) -> Any:
        return module(tokens, cache=cache, return_cache=True)

    return WholeText(module, sampled(module), later, {"segment": 8})


def sampled(module: nn.Module) -> Any:
    """All logits by one call, and the cache by single tokens, which is how the model samples."""

    def first(tokens: torch.Tensor) -> Any:
        cache = None
        for stop in range(1, tokens.shape[1] + 1):
            _, cache = module(tokens[:, :stop], cache=cache, return_cache=True)
        return module(tokens), cache

    return first


# ----- xlstm


class Stepped:
    """A model that reads a whole text at once, or carries a state in single steps."""

    budget = 10

    def __init__(self, module: nn.Module, inputs: Inputs, lengths: Any = None) -> None:
        self.module = module
        self.inputs = inputs
        self.claims = Claims(consumes_state=True, lengths=lengths or {})

    def start(self, batch_size: int) -> Any:
        return None

    def read(self, inputs: torch.Tensor, state: Any) -> Any:
        outputs = []
        whole = self.module(inputs) if state is None and inputs.shape[1] > 1 else None
        for t in range(inputs.shape[1]):
            y, state = self.module.step(inputs[:, t : t + 1], state=state)
            outputs.append(y)
        return torch.cat(outputs, 1) if whole is None else whole, state

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        return mapped(lambda part: part[rows], state)

    def copy(self, state: Any) -> Any:
        return copied(state)


@target("xlstm: mLSTM", False)
@target("xlstm: mLSTM and sLSTM", True)
def _(both: bool) -> Any:
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
    if not both:
        return Stepped(module.eval(), Inputs(vocab_size=VOCABULARY), {"convolution": 4})
    # A step of sLSTM takes the state of each row apart by its second dimension.
    model = Stepped(module.eval(), Inputs(vocab_size=VOCABULARY), {"convolution": 4})
    model.select = lambda state, rows: {  # type: ignore[method-assign]
        name: {
            part: value[:, rows] if part == "slstm_state" else mapped(lambda t: t[rows], value)
            for part, value in block.items()
        }
        for name, block in state.items()
    }
    return model


# ----- fla: the operations' references, which run without Triton


class OfFla(nn.Module):
    """A layer of two heads around an operation; gates in its logarithms, strengths below one."""

    def __init__(
        self, operation: Any, gates: dict[str, int], chunk: int, heads_first: bool
    ) -> None:
        super().__init__()
        self.operation = operation
        self.options = {"chunk_size": chunk} if chunk else {}
        self.heads_first = heads_first
        widths = {"q": 4, "k": 4, "v": 4, **gates}
        self.projections = nn.ModuleDict({n: nn.Linear(8, 2 * w) for n, w in widths.items()})

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        given = {}
        for name, projection in self.projections.items():
            part = projection(x).unflatten(-1, (2, -1))
            if name == "k":
                part = nn.functional.normalize(part, dim=-1)
            elif name == "beta":
                part = part.sigmoid()
            elif name in ("g", "gk"):
                part = nn.functional.logsigmoid(part)
            part = part.squeeze(-1)
            given[name] = part.transpose(1, 2) if self.heads_first else part
        y, state = self.operation(
            **given, **self.options, initial_state=state, output_final_state=True
        )
        return (y.transpose(1, 2) if self.heads_first else y).flatten(2), state


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
    # The package imports Triton's operations, which takes longer than all laws.
    place = importlib.util.find_spec("fla")
    assert place
    assert place.submodule_search_locations
    path = Path(place.submodule_search_locations[0], "ops", folder, "naive.py")
    operations = runpy.run_path(str(path))
    operation = operations.get(name) or operations[f"naive_{name}"]
    module = OfFla(operation, gates, chunk, folder == "delta_rule")
    claims = Claims(lengths={"chunk": chunk} if chunk else {})
    return Function(module, lambda rows: None, Inputs(width=8), module, claims)


# ----- Reinforcement learning


@target("torchrl: LSTMModule", "LSTMModule", ("h", "c"))
@target("torchrl: GRUModule", "GRUModule", ("h",))
def _(kind: str, names: tuple[str, ...]) -> Any:
    return OfTorchRL(kind, names)


class OfTorchRL:
    """Steps while acting, and whole windows in recurrent mode."""

    claims = Claims()
    inputs = Inputs(width=4)

    def __init__(self, kind: str, names: tuple[str, ...]) -> None:
        from torchrl import modules

        after = [("next", name) for name in names]
        keys = {"in_keys": ["obs", *names], "out_keys": ["out", *after]}
        self.names = names
        self.module = getattr(modules, kind)(input_size=4, hidden_size=8, **keys)

    def start(self, batch_size: int) -> Any:
        return tuple(torch.zeros(batch_size, 1, 8) for _ in self.names)

    def read(self, inputs: torch.Tensor, state: Any) -> Any:
        from tensordict import TensorDict

        outputs = []
        rows = len(inputs)
        for t in range(inputs.shape[1]):
            new = torch.zeros(rows, 1, dtype=torch.bool)
            data = dict(zip(self.names, state, strict=True), obs=inputs[:, t], is_init=new)
            done = self.module(TensorDict(data, [rows]))
            state = tuple(done["next", name] for name in self.names)
            outputs.append(done["out"])
        return torch.stack(outputs, 1), state

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        from tensordict import TensorDict
        from torchrl.modules import set_recurrent_mode

        rows, steps = inputs.shape[:2]
        # As an environment stores them: zeros where an episode begins.
        new = starts[..., None, None]
        kept = [torch.where(new, 0.0, s[:, None].expand(-1, steps, -1, -1)) for s in state]
        data = dict(zip(self.names, kept, strict=True), obs=inputs, is_init=starts[..., None])
        with set_recurrent_mode(True):
            done = self.module(TensorDict(data, [rows, steps]))
        return done["out"], tuple(done["next", name][:, -1] for name in self.names)

    def replay(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.read_packed(inputs, state, starts)[0]
        return y

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        return tuple(part[rows] for part in state)

    def copy(self, state: Any) -> Any:
        return tuple(part.clone() for part in state)


@target("sb3-contrib: RecurrentActorCriticPolicy")
def _() -> Any:
    return OfSB3()


class OfSB3:
    """The values of a recurrent policy: many steps as in training, single ones as in acting."""

    claims = Claims(carries_gradients=False)
    inputs = Inputs(width=4)

    def __init__(self) -> None:
        import numpy as np
        from gymnasium.spaces import Box, Discrete
        from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

        box = Box(-np.inf, np.inf, (4,), np.float32)
        self.module = RecurrentActorCriticPolicy(
            box, Discrete(3), lambda _: 1e-3, lstm_hidden_size=8, enable_critic_lstm=False,
            shared_lstm=True,
        )  # fmt: skip

    def start(self, batch_size: int) -> Any:
        return torch.zeros(1, batch_size, 8), torch.zeros(1, batch_size, 8)

    def read(self, inputs: torch.Tensor, state: Any) -> Any:
        return self.read_packed(inputs, state, torch.zeros(inputs.shape[:2], dtype=torch.bool))

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        features = self.module.extract_features(inputs.flatten(0, 1))
        y, state = self.module._process_sequence(
            features, state, starts.float().flatten(), self.module.lstm_actor
        )
        values = self.module.value_net(self.module.mlp_extractor.forward_critic(y))
        return values.unflatten(0, inputs.shape[:2]), state

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        return tuple(part[:, rows] for part in state)

    def copy(self, state: Any) -> Any:
        return tuple(part.clone() for part in state)


# ----- memax, by JAX


class OfJax:
    """A model of equinox, whose weights are parameters here; arrays go over by dlpack."""

    inputs = Inputs(width=4)
    claims = Claims(carries_gradients=False)
    # Each shape of inputs is compiled anew, which takes most of the time.
    laws = ("repeatable", "cuts", "causality", "rows", "values", "fresh-start")
    budget = 20

    def __init__(self, name: str) -> None:
        import equinox
        import jax
        from memax.equinox.train_utils import get_residual_memory_model

        key = jax.random.key(0)
        model = get_residual_memory_model(name, 4, 16, 5, num_layers=1, key=key)
        weights, self.rest = equinox.partition(model, equinox.is_inexact_array)
        leaves, self.tree = jax.tree.flatten(weights)
        self.module = nn.Module()
        self.own = nn.ParameterList([nn.Parameter(to_torch(leaf)) for leaf in leaves])
        self.module.add_module("own", self.own)

        def row(weights: Any, state: Any, x: Any, starts: Any) -> Any:
            model = equinox.combine(weights, self.rest)
            states, y = model(state, (x, starts))
            return y, model.latest_recurrent_state(states)

        self.rows = equinox.filter_jit(jax.vmap(row, in_axes=(None, 0, 0, 0)))
        self.first = model.initialize_carry

    def start(self, batch_size: int) -> Any:
        import jax

        return jax.tree.map(
            lambda leaf: to_torch(leaf[None]).repeat(batch_size, *[1] * leaf.ndim), self.first()
        )

    def read(self, inputs: torch.Tensor, state: Any) -> Any:
        return self.read_packed(inputs, state, torch.zeros(inputs.shape[:2], dtype=torch.bool))

    def read_packed(self, inputs: torch.Tensor, state: Any, starts: torch.Tensor) -> Any:
        import jax

        weights = jax.tree.unflatten(self.tree, [to_jax(each) for each in self.own])
        y, state = self.rows(weights, jax.tree.map(to_jax, state), to_jax(inputs), to_jax(starts))
        return to_torch(y), jax.tree.map(to_torch, state)

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        import jax

        return jax.tree.map(lambda part: part[rows], state)

    def copy(self, state: Any) -> Any:
        import jax

        return jax.tree.map(torch.clone, state)


def to_jax(tensor: torch.Tensor) -> Any:
    import jax

    if tensor.dtype == torch.bool:
        return jax.numpy.asarray(tensor.numpy())
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: Any) -> torch.Tensor:
    if array.dtype == bool:
        import numpy

        return torch.from_numpy(numpy.array(array))
    return torch.from_dlpack(array).clone()


for each in ("GRU", "LRU", "FFM", "DeltaNet", "Attention-RoPE", "S6"):
    TARGETS[f"memax: {each}"] = lambda each=each: OfJax(each)


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
