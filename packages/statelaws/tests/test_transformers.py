"""Models of transformers: small ones of a type, and folders. Skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from statelaws import check
from statelaws.adapters.recipes import RECIPES, build
from statelaws.adapters.transformers import Causal
from statelaws.cli import main
from statelaws.errors import RefusedError
from statelaws.states import tensors_of

transformers = pytest.importorskip("transformers")
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.usefixtures("own_folder")
since_5_17 = pytest.mark.skipif(RELEASE < (5, 17), reason="5.10 is not as 5.17 is")
ONE_TOKEN = ("falcon_h1", "falcon_mamba", "mamba", "nemotron_h", "zamba2")
"""Types that transformers 5.4 reads on with single tokens only."""
QUICK = ("cuts", "causality", "rows", "values", "order-of-calls")


def made(model_type: str) -> Causal:
    """The model; the test is skipped where an earlier release than the pinned one does not have it."""
    if RELEASE < (5, 10) and model_type in ONE_TOKEN:
        pytest.skip("read on with single tokens only")
    try:
        return build(model_type)
    except RefusedError as error:
        if RELEASE < (5, 24) and "cannot make it" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("model_type", RECIPES)
def test_every_recipe_remembers_and_says_whether_its_cache_grows(model_type: str) -> None:
    model = made(model_type)
    tokens = model.inputs.draw(1, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        fresh, _ = model.read(tokens[:, 3:], model.start(1))
        _, state = model.read(tokens[:, :3], model.start(1))
        later, state = model.read(tokens[:, 3:], state)
        sizes = []
        for _ in range(5):
            _, state = model.read(tokens[:, 3:], state)
            sizes.append(sum(tensor.numel() for tensor in tensors_of(state)))
    assert later.shape == (1, 3, 64)
    assert (later - fresh).abs().max() > 0.1 * later.std()
    assert (sizes[-1] == sizes[-2]) == model.claims.bounded


def test_a_script_makes_the_same_model() -> None:
    made = build("mistral", 3)
    names: dict[str, object] = {"torch": torch}
    exec("import torch\n" + made.source(("start", "read", "read_padded")), names)
    tokens = made.inputs.draw(2, 9, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, state = made.read(tokens, made.start(2))
        seen, own = names["read"](tokens, names["start"](2))  # type: ignore[operator]
        assert torch.equal(seen, expected)
        lengths = torch.tensor([9, 4])
        expected, _ = made.read_padded(tokens, state, lengths, "right")
        seen, _ = names["read_padded"](tokens, own, lengths, "right")  # type: ignore[operator]
    assert torch.equal(seen[0], expected[0])
    assert torch.equal(seen[1, :4], expected[1, :4])


@pytest.mark.parametrize(("model_type", "outcome"), [("llama", "holds"), ("xlstm", "not-offered")])
def test_rolling_back_is_the_caches_own(model_type: str, outcome: str) -> None:
    report = check(build(model_type), ["roll-back"], budget=120)
    assert report["roll-back"].outcome == outcome


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "gpt2", "mistral", "gemma2"),
        *(pytest.param(name, marks=since_5_17) for name in ("mamba2", "lfm2")),
    ],
)
def test_models_that_are_right_raise_no_alarm(model_type: str) -> None:
    report = check(build(model_type), QUICK, budget=120)
    assert {f.outcome for f in report.findings} == {"holds"}, report


@since_5_17
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_a_second_segment_of_several_tokens_is_found(
    model_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(build(model_type), ["cuts", "values"], budget=120)
    assert [f.law for f in report.broken] == ["cuts"]
    script = report["cuts"].script
    assert script is not None
    assert "statelaws" not in script
    # Without functions that it does not need.
    assert "def read(" in script
    assert "def truncate(" not in script
    with torch.enable_grad():
        exec(script, {})
    assert float(capsys.readouterr().out) > 1e-3


@pytest.mark.skipif(RELEASE >= (5, 10), reason="a fault of transformers 5.4")
def test_a_second_segment_of_several_tokens_is_found_where_attention_sees_the_first() -> None:
    """Its convolutions have one output for all tokens of a segment; single tokens are right."""
    model = build("lfm2")
    assert [f.law for f in check(model, ["cuts", "causality"], budget=60).broken] == [
        "cuts",
        "causality",
    ]
    tokens = model.inputs.draw(1, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, _ = model.read(tokens, model.start(1))
        state = model.start(1)
        for at in range(6):
            one, state = model.read(tokens[:, at : at + 1], state)
            torch.testing.assert_close(one, whole[:, at : at + 1], rtol=1e-4, atol=1e-4)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path("executed").touch()


class Config(LlamaConfig):
    model_type = "mine"


class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_of_a_folder_is_not_executed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    Path("folder").mkdir()
    Path("folder/code.py").write_text(CODE)
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    Path("folder/config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    for options, message in (([], "--trust-remote-code"), (["--trust-remote-code"], "")):
        assert not Path("executed").exists()
        with pytest.raises(SystemExit) as stop:
            main(["check", "folder", *options])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert "folder cannot be loaded" in said
        assert message in said
    assert Path("executed").exists()
