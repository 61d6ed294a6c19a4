"""A plan fits only its model, including the names of tied parameters."""

import copy

import pytest
from support.meshes import slow_devices
from support.models import gpt2, graph_of, small_graph

from autoshard.errors import PlanError
from autoshard.planner import make_plan
from autoshard.runtime.parameters.parameters import check_parameters

MESH = slow_devices(dp=2)


def test_a_tie_that_the_export_lost_is_refused_by_name() -> None:
    """Moved to the meta device a model has two parameters for one, and its plan two layouts."""
    model, arguments = gpt2()
    untied = copy.deepcopy(model).to("meta")
    (stage,) = make_plan(graph_of((untied, arguments)), MESH).stages
    assert {"transformer.wte.weight", "lm_head.weight"} <= {p.target for p in stage.parameters}
    with pytest.raises(
        PlanError,
        match=r"transformer\.wte\.weight, lm_head\.weight are tied in the model, but not in the "
        r"plan; .*export_model",
    ):
        check_parameters(model, stage, frozen=frozenset())
    check_parameters(untied, stage, frozen=frozenset())


def test_a_tie_that_the_plan_knows_is_taken() -> None:
    (stage,) = make_plan(small_graph(gpt2), MESH).stages
    check_parameters(gpt2()[0], stage, frozen=frozenset())
