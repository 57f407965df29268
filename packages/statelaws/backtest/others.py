"""Models of other libraries than transformers, as users call them. Imported by models.py."""

from __future__ import annotations

import functools
import importlib.util
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from registry import VOCABULARY, Make, bug
from statelaws import Claims, Function, Inputs
from statelaws.states import mapped

# ----- x-transformers: the cache is given together with the whole text so far


class WholeText:
    """State: all tokens so far, and the cache after them."""

    claims = Claims(bounded=False, carries_gradients=False)
    inputs = Inputs(vocab_size=VOCABULARY)

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()

    def start(self, batch_size: int) -> Any:
        return torch.zeros(batch_size, 0, dtype=torch.long), None

    def read(self, inputs: Tensor, state: Any) -> Any:
        tokens, cache = state
        tokens = torch.cat([tokens, inputs], 1)
        if cache is None:
            return self.first(tokens)
        outputs = []
        for t in range(inputs.shape[1], 0, -1):
            # Decoding is one token at a time.
            stop = tokens.shape[1] - t + 1
            y, (_, cache) = self.later(tokens[:, :stop], cache)
            outputs.append(y)
        return torch.cat(outputs, 1), (tokens, cache)

    def first(self, tokens: Tensor) -> Any:
        y, cache = self.module(tokens, return_intermediates=True)
        return y, (tokens, cache)

    def later(self, tokens: Tensor, cache: Any) -> Any:
        y, cache = self.module(tokens, cache=cache, return_intermediates=True)
        return y[:, -1:], (tokens, cache)

    def select(self, state: Any, rows: Tensor) -> Any:
        n = len(state[0])
        return mapped(lambda part: part[rows] if part.dim() and len(part) == n else part, state)

    def copy(self, state: Any) -> Any:
        return deepcopy(state)


def x_transformer(**options: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=2, **{"attn_dim_head": 16, **options})
    module = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=512, attn_layers=layers)
    large(module)
    return WholeText(module)


def large(module: nn.Module) -> None:
    """Make weights large enough that the state matters."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0, weight[0].numel() ** -0.5)
            if "emb" in name:
                weight.normal_()


@bug("x-transformers-kv-cache")
def _() -> dict[str, Make]:
    return {
        "absolute positions": x_transformer,
        # These turn 32 numbers of a head at least.
        "rotary positions": lambda: x_transformer(rotary_pos_emb=True, attn_dim_head=32),
    }


@bug("x-transformers-flash-cache")
def _() -> dict[str, Make]:
    return {"flash": lambda: x_transformer(attn_flash=True)}


@bug("x-transformers-rotary-mems")
def _() -> dict[str, Make]:
    def make() -> Any:
        from x_transformers import Decoder, TransformerWrapper

        torch.manual_seed(0)
        layers = Decoder(
            dim=32, depth=2, heads=2, attn_dim_head=32, rotary_pos_emb=True, attn_num_mem_kv=4
        )
        module = TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=512, max_mem_len=16, attn_layers=layers
        )
        large(module)
        module.eval()

        def read(x: Tensor, mems: Any) -> Any:
            return module(x, mems=mems or None, return_mems=True)

        claims = Claims(cuts=False, carries_gradients=False)
        return Function(read, lambda rows: [], Inputs(vocab_size=VOCABULARY), module, claims)

    return {"memories": make}


class WithContext(WholeText):
    """A decoder of vectors that sees a context, which is the same for all rows."""

    claims = Claims(bounded=False, carries_gradients=False)
    inputs = Inputs(width=32)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.context = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))

    def start(self, batch_size: int) -> Any:
        return torch.zeros(batch_size, 0, 32), None

    def first(self, tokens: Tensor) -> Any:
        context = self.context.expand(len(tokens), -1, -1)
        y, cache = self.module(tokens, context, return_hiddens=True)
        return y, (tokens, cache)

    def later(self, tokens: Tensor, cache: Any) -> Any:
        context = self.context.expand(len(tokens), -1, -1)
        y, cache = self.module(tokens, context, cache=cache, return_hiddens=True)
        return y[:, -1:], (tokens, cache)


@bug("x-transformers-cross-attention-cache")
def _() -> dict[str, Make]:
    def make() -> Any:
        from x_transformers import Decoder

        torch.manual_seed(0)
        options = {"cross_attend": True, "rotary_pos_emb": True, "attn_flash": True}
        module = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
        large(module)
        return WithContext(module)

    return {"cross-attention": make}


# ----- Others of its author


@bug("mingru-sequential")
def _() -> dict[str, Make]:
    def make() -> Any:
        from minGRU_pytorch import minGRU

        torch.manual_seed(0)
        module = minGRU(dim=8)

        def read(x: Tensor, state: Any) -> Any:
            y, h = module(x, prev_hidden=state, return_next_prev_hidden=True)
            return y, h

        # Hidden states are positive; the empty one is as near to zero as its logarithm allows.
        return Function(read, lambda rows: torch.zeros(rows, 1, 8), Inputs(width=8), module)

    return {"minGRU": make}


class LastToken(WholeText):
    def first(self, tokens: Tensor) -> Any:
        y, cache = self.module(tokens, return_cache=True)
        return y, (tokens, cache)

    def later(self, tokens: Tensor, cache: Any) -> Any:
        y, cache = self.module(tokens, cache=cache, return_cache=True)
        return y, (tokens, cache)


@bug("sparse-attention-cache")
def _() -> dict[str, Make]:
    def make() -> Any:
        from native_sparse_attention_pytorch.transformer import Transformer

        torch.manual_seed(0)
        sparse = {
            "sliding_window_size": 4,
            "compress_block_size": 4,
            "selection_block_size": 4,
            "num_selected_blocks": 2,
        }
        sizes = {"dim": 32, "depth": 2, "dim_head": 16, "heads": 2, "kv_heads": 2}
        try:
            module = Transformer(
                VOCABULARY, use_sparse_attn=True, sparse_attn_kwargs=sparse, **sizes
            )
        except TypeError:
            sparse["compress_block_sliding_stride"] = 4
            module = Transformer(
                VOCABULARY, use_sparse_attn=True, sparse_attn_kwargs=sparse, **sizes
            )
        large(module)
        return LastToken(module)

    return {"sparse attention": make}


class Turned(nn.Module):
    """Attention whose keys are turned by the library; the cache has them turned."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.projections = nn.ModuleDict({n: nn.Linear(16, 16) for n in ("q", "k", "v")})

    def forward(self, x: Tensor, state: Any) -> Any:
        before = state[0].shape[2]
        q, k, v = (self.projections[n](x)[:, None] for n in ("q", "k", "v"))
        q, k = (self.rotary.rotate_queries_or_keys(each, offset=before) for each in (q, k))
        k = torch.cat([state[0], k], 2)
        v = torch.cat([state[1], v], 2)
        seen = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(before)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return y[:, 0] + x, (k, v)


@bug("rotary-cache-key")
def _() -> dict[str, Make]:
    def make() -> Any:
        from rotary_embedding_torch import RotaryEmbedding

        torch.manual_seed(0)
        module = Turned(RotaryEmbedding(dim=16))
        large(module)

        def start(rows: int) -> Any:
            return torch.zeros(rows, 1, 0, 16), torch.zeros(rows, 1, 0, 16)

        return Function(module, start, Inputs(width=16), module, Claims(bounded=False))

    return {"attention": make}


# ----- Reinforcement learning


class Trained:
    """TorchRL's LSTM: steps while acting, whole windows in recurrent mode."""

    claims = Claims()
    inputs = Inputs(width=4)
    size = 8

    def __init__(self) -> None:
        from torchrl.modules import LSTMModule

        torch.manual_seed(0)
        keys = ["out", ("next", "h"), ("next", "c")]
        self.net = LSTMModule(
            input_size=4, hidden_size=self.size, in_keys=["obs", "h", "c"], out_keys=keys
        )
        self.module = self.net

    def start(self, batch_size: int) -> Any:
        zeros = torch.zeros(batch_size, 1, self.size)
        return zeros, zeros.clone()

    def read(self, inputs: Tensor, state: Any) -> Any:
        from tensordict import TensorDict

        outputs = []
        for t in range(inputs.shape[1]):
            rows = len(inputs)
            new = torch.zeros(rows, 1, dtype=torch.bool)
            data = {"obs": inputs[:, t], "h": state[0], "c": state[1], "is_init": new}
            done = self.net(TensorDict(data, [rows]))
            state = done["next", "h"], done["next", "c"]
            outputs.append(done["out"])
        return torch.stack(outputs, 1), state

    def read_packed(self, inputs: Tensor, state: Any, starts: Tensor) -> Any:
        from tensordict import TensorDict
        from torchrl.modules import set_recurrent_mode

        rows, steps = inputs.shape[:2]
        # As an environment stores them: zeros where an episode begins.
        new = starts[..., None, None]
        h, c = (torch.where(new, 0.0, part[:, None].expand(-1, steps, -1, -1)) for part in state)
        data = {"obs": inputs, "h": h, "c": c, "is_init": starts[..., None]}
        with set_recurrent_mode(True):
            done = self.net(TensorDict(data, [rows, steps]))
        return done["out"], (done["next", "h"][:, -1], done["next", "c"][:, -1])

    def select(self, state: Any, rows: Tensor) -> Any:
        return tuple(part[rows] for part in state)

    def copy(self, state: Any) -> Any:
        return tuple(part.clone() for part in state)


@bug("torchrl-lstm-states")
def _() -> dict[str, Make]:
    return {"LSTMModule": Trained}


# ----- litgpt, continual-inference, fla's cache


class Slots:
    """litgpt's model keeps its cache in itself; the state is a copy of it, and a position."""

    claims = Claims(lengths={"window": 8}, carries_gradients=False)
    inputs = Inputs(vocab_size=VOCABULARY)

    def __init__(self) -> None:
        from litgpt import GPT, Config

        torch.manual_seed(0)
        self.module = GPT(
            Config(
                block_size=256, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=2,
                n_head=2, n_embd=32, sliding_window_size=8, sliding_window_indices=[1, 0],
            )
        )  # fmt: skip
        large(self.module)

    def start(self, batch_size: int) -> Any:
        self.module.set_kv_cache(batch_size)
        return self._caches(batch_size), 0

    def _caches(self, batch_size: int) -> Any:
        caches = [block.attn.kv_cache for block in self.module.transformer.h]
        return [(each.k.clone(), each.v.clone()) for each in caches]

    def read(self, inputs: Tensor, state: Any) -> Any:
        caches, at = state
        self.module.set_kv_cache(len(inputs))
        for block, (k, v) in zip(self.module.transformer.h, caches, strict=True):
            block.attn.kv_cache.k = k.clone()
            block.attn.kv_cache.v = v.clone()
        y = self.module(inputs, torch.arange(at, at + inputs.shape[1]))
        return y, (self._caches(len(inputs)), at + inputs.shape[1])

    def select(self, state: Any, rows: Tensor) -> Any:
        return [(k[rows], v[rows]) for k, v in state[0]], state[1]

    def copy(self, state: Any) -> Any:
        return [(k.clone(), v.clone()) for k, v in state[0]], state[1]


@bug("litgpt-window-prefill")
def _() -> dict[str, Make]:
    return {"litgpt": Slots}


class Buffered:
    """A continual convolution keeps its window in itself."""

    claims = Claims(carries_gradients=False)
    inputs = Inputs(width=4)

    def __init__(self) -> None:
        import continual

        torch.manual_seed(0)
        kind = getattr(continual, "Conv1d", None) or continual.ConvCo1d
        self.module = continual.Sequential(kind(4, 6, 3), kind(6, 6, 3))

    def start(self, batch_size: int) -> Any:
        self.module.clean_state()
        zeros = torch.zeros(batch_size, 4, 4)
        self.module.forward_steps(zeros)
        return self._kept()

    def _kept(self) -> Any:
        found = []
        for each in self.module.modules():
            names = ("state_buffer", "state_index", "stride_index")
            found.append({name: deepcopy(getattr(each, name, None)) for name in names})
        return found

    def read(self, inputs: Tensor, state: Any) -> Any:
        for each, kept in zip(self.module.modules(), state, strict=True):
            for name, value in kept.items():
                if hasattr(each, name):
                    setattr(each, name, deepcopy(value))
        if inputs.shape[1] == 1:
            y = self.module.forward_step(inputs[:, 0])[..., None]
        else:
            y = self.module.forward_steps(inputs.mT)
        return y.mT, self._kept()

    def select(self, state: Any, rows: Tensor) -> Any:
        return [
            {n: v[:, rows] if isinstance(v, Tensor) and v.dim() > 1 else v for n, v in each.items()}
            for each in state
        ]

    def copy(self, state: Any) -> Any:
        return deepcopy(state)


@bug("continual-forward-steps")
def _() -> dict[str, Make]:
    return {"two convolutions": Buffered}


@functools.cache
def fla_models_utils() -> Any:
    """fla's module of caches alone: the package itself imports triton."""
    found = importlib.util.find_spec("fla")
    assert found
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "models" / "utils.py"
    spec = importlib.util.spec_from_file_location("fla_models_utils", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OverCache:
    """Two layers of rotary attention over fla's cache, as its attention layers use it."""

    inputs = Inputs(width=16)

    def __init__(self, window: int | None) -> None:
        torch.manual_seed(0)
        self.window = window
        lengths = {} if window is None else {"window": window}
        self.claims = Claims(
            bounded=window is not None,
            consumes_state=True,
            lengths=lengths,
            carries_gradients=False,
        )
        layer = {n: nn.Linear(16, 16) for n in ("q", "k", "v")}
        self.module = nn.ModuleList([nn.ModuleDict(deepcopy(layer)) for _ in range(2)])
        large(self.module)

    def start(self, batch_size: int) -> Any:
        return fla_models_utils().Cache()

    def read(self, inputs: Tensor, state: Any) -> Any:
        x = inputs
        n = x.shape[1]
        for i, layer in enumerate(self.module):
            before = state.get_seq_length(i)
            q, k, v = (layer[name](x) for name in ("q", "k", "v"))
            q, k = (turned(each, before) for each in (q, k))
            options = {} if self.window is None else {"window_size": self.window}
            kept = state.update(attn_state=(k, v), layer_idx=i, offset=n, cache_kwargs=options)
            if before:
                k, v = kept["attn_state"]
            places = torch.arange(k.shape[1]) - (k.shape[1] - n)
            back = torch.arange(n)[:, None] - places
            seen = (back >= 0) & (back < (self.window or 1 << 30))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x, state

    def select(self, state: Any, rows: Tensor) -> Any:
        return mapped(lambda part: part[rows] if part.dim() > 1 else part, state)

    def copy(self, state: Any) -> Any:
        return mapped(lambda part: part.detach().clone(), state)


def turned(x: Tensor, before: int) -> Tensor:
    position = torch.arange(before, before + x.shape[1])[:, None]
    angle = position * torch.tensor([1.0, 0.5, 0.3, 0.1, 0.05, 0.03, 0.02, 0.01])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@bug("fla-seen-tokens")
def _() -> dict[str, Make]:
    return {"attention": lambda: OverCache(None)}


@bug("fla-window-cache")
def _() -> dict[str, Make]:
    return {"attention in a window": lambda: OverCache(6)}
