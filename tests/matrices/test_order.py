"""A shard's largest matrices come first, unless that would change who has a longname."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardesd.matrices import Context, largest_first, plan, stacked
from shardesd.records import TensorRef


def tensors(**shapes: tuple[int, ...]) -> list[TensorRef]:
    return [
        TensorRef(name=name.replace("__", "."), shard="s", dtype="F32", shape=shape, start=0, end=4)
        for name, shape in shapes.items()
    ]


def ordered(given: Sequence[TensorRef], **config: object) -> list[str]:
    context = Context(config=config, names=frozenset(tensor.name for tensor in given))
    plans = {tensor: plan(tensor, context) for tensor in given if not stacked(tensor, context)}
    assert len(plans) < len(given) or not any("experts" in tensor.name for tensor in given)
    return [tensor.name for tensor in largest_first(given, plans, context)]


def test_by_the_shorter_side_and_then_as_they_lie() -> None:
    given = tensors(
        a__weight=(30, 20), b__weight=(50, 50), c__bias=(70,), d__weight=(20, 90), e__experts__w=(4, 40, 60)
    )
    assert ordered(given) == ["b.weight", "e.experts.w", "a.weight", "d.weight", "c.bias"]


MAMBA = {"model_type": "mamba", "time_step_rank": 8, "state_size": 16, "intermediate_size": 64, "hidden_size": 32}


@pytest.mark.parametrize("name", ["x_proj_dt", "x_proj_B"])
def test_who_is_first_has_a_longname_that_meets_another(name: str) -> None:
    given = tensors(**{"m__mixer__x_proj__weight": (40, 64), f"m__mixer__{name}__weight": (64, 64)})
    assert ordered(given, **MAMBA) == ["m.mixer.x_proj.weight", f"m.mixer.{name}.weight"]
    other = tensors(m__mixer__x_proj__weight=(40, 64), m__mixer__x_proj_D__weight=(64, 64))
    assert ordered(other, **MAMBA) == ["m.mixer.x_proj_D.weight", "m.mixer.x_proj.weight"]
