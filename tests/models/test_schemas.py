"""Schemas: every tensor, module and attribute that a kernel knows, and nothing besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from architectures import CASES, Case, feedback, transformer_xl
from golden import assert_same
from memspan.models.feedback.model import PARTS
from memspan.models.packing import Schema, is_exactly, schema_of
from memspan.models.readers import PassReader
from readings import text

pytestmark = pytest.mark.hardening

WITHOUT = ["infini", "lstm", "rmt", "rwkv", "transformer"]
WITH_KERNELS = {name: case for name, case in CASES.items() if name.split("-")[0] not in WITHOUT}
with_kernels = pytest.mark.parametrize("case", WITH_KERNELS.values(), ids=WITH_KERNELS)


def without_one(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schema without each of its modules, parameters and buffers in turn."""
    for name, part in schema.items():
        yield name, {other: each for other, each in schema.items() if other != name}
        for field in ("parameters", "buffers"):
            for tensor in getattr(part, field):
                rest = {n: size for n, size in getattr(part, field).items() if n != tensor}
                yield (
                    f"{name}.{tensor}".lstrip("."),
                    schema | {name: part._replace(**{field: rest})},
                )


@with_kernels
def test_schemas_name_all_that_there_is(case: Case) -> None:
    """Kernels run where nothing was changed; no name can be left out, none is left over, and what
    methods read is looked at."""
    backbone = case.model().backbone
    assert backbone.is_as_made()
    assert not isinstance(backbone.reader(None, 1), PassReader)
    names = {name for name, _ in without_one(backbone.schema)}
    assert names >= {name for name, _ in backbone.named_parameters()}
    for name, less in without_one(backbone.schema):
        assert not is_exactly(backbone, less), name
    for place, expected in backbone.schema.items():
        part = backbone.get_submodule(place)
        for name, value in expected.attributes.items():
            setattr(part, name, None)
            assert not backbone.is_as_made(), f"{name} of {place}"
            setattr(part, name, value)
    assert backbone.is_as_made()


@pytest.mark.parametrize("part", [nn.Linear(2, 2), nn.Dropout(), nn.Parameter(torch.zeros(2))])
def test_a_part_that_kernels_do_not_name(part: nn.Module | nn.Parameter) -> None:
    """As when a layer has got a new part in its class: there is no schema then."""
    backbone = feedback().model().backbone
    assert schema_of(backbone, PARTS) == backbone.schema
    backbone.layers[0].new = part
    assert schema_of(backbone, PARTS) is None


def test_methods_of_classes_and_hooks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = transformer_xl().model().backbone
    layer = type(backbone.layers[0])
    original = layer.residual
    with monkeypatch.context() as patch:
        patch.setattr(layer, "residual", lambda *given: 0.7 * original(*given))
        model = transformer_xl().model()
        tokens = text(1, 3)
        expected = model(tokens, implementation="reference").logits
        assert_same(model.reader().read(tokens), expected, 1e-10, "logits")
        assert not backbone.is_as_made()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not backbone.is_as_made()
    handle.remove()
    assert backbone.is_as_made()
