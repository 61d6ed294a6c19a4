"""Pipelines, compiled models, training libraries, and habits around checkpoints, on 2 ranks."""

from collections.abc import Callable

import pytest
from integrations.cases import adapters, generated, trainer_settings
from runtime.cases import checkpoint_habits, compiled, pipeline_cuts
from runtime.cases.pipelines import LOOPED, ON_2
from support.long_cases import with_long
from support.ranks import joined

NUM_RANKS = 2
LIBRARIES = (adapters, generated, trainer_settings)
CASES = {
    **ON_2,
    **pipeline_cuts.CASES,
    **checkpoint_habits.ON_2,
    **joined(compiled),
    **{name: case for module in LIBRARIES for name, case in module.ON_2.items()},
}
LONG = [
    *(f"t5, {schedule}" for schedule in LOOPED[1:]),
    *("gpt2, 1F1B", "llama, GPipe", "t5, GPipe", "resnet, 1F1B"),
    *("t5, ZBVZeroBubble, mixed precision", "opaque modules with declared costs"),
]
"""Each model and each schedule are in the others, or in those on 4 ranks."""


@pytest.mark.matrix(4)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
