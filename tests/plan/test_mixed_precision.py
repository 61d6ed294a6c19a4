"""Plans under a mixed-precision policy."""

from typing import Any

import pytest
from support.meshes import slow_devices
from support.models import gpt2

from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.exports import export_plan
from autoshard.graph import Graph, MixedPrecision, export_model, load_graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan


def graph(**policy: Any) -> Graph:
    model, batch = gpt2(batch=8)
    return load_graph(export_model(model, (), batch, mixed_precision=MixedPrecision(**policy)))


def test_reductions_have_the_bytes_of_their_element_type() -> None:
    program = graph(param_dtype="bfloat16", reduce_dtype="float32")
    pins = {"parameters": {"*": "S(0)"}}
    options = PlanOptions(pins=pins, batch_axis="a")
    plan = make_plan(program, slow_devices(a=4), options)
    assert not check_plan(plan)
    (stage,) = plan.stages
    assert {p.dtype for p in stage.parameters} == {"float32"}
    names = {p.name for p in stage.parameters}
    steps = [s for r in stage.reshardings if r.value in names for s in r.steps]
    assert any((s.forward, s.backward) == ("all_gather", "reduce_scatter") for s in steps)
    for step in steps:
        assert step.gradient_nbytes == step.backward_nbytes == 2 * step.nbytes
    wrong = steps[0].model_copy(update={"gradient_nbytes": None})
    reshardings = tuple(
        r.model_copy(update={"steps": tuple(wrong if s is steps[0] else s for s in r.steps)})
        for r in stage.reshardings
    )
    changed = stage.model_copy(update={"reshardings": reshardings})
    findings = check_plan(plan.model_copy(update={"stages": (changed,)}))
    assert any("bytes of gradients, not None" in finding for finding in findings)


WRITTEN = {
    "fsdp2": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
    "reduce_dtype=torch.float32)",
    "accelerate": "mixed_precision: bf16",
    "torchtitan": 'dtype = "float32"\nmixed_precision_param = "bfloat16"\n'
    'mixed_precision_reduce = "float32"',
    "megatron": "--bf16",
    "json": '"param_dtype": "bfloat16"',
    "csv": "bfloat16 compute",
}


@pytest.mark.parametrize("target", WRITTEN)
def test_exports_have_the_policy(target: str) -> None:
    program = graph(param_dtype="bfloat16", reduce_dtype="float32")
    plan = make_plan(program, slow_devices(a=4), PlanOptions(batch_axis="a"))
    text = export_plan(plan, target, min_expressed=0)
    assert WRITTEN[target] in text
    words = " ".join(text.replace("#", "").split())
    assert "bfloat16 compute, float32 parameters" in words


def test_exports_of_layers_have_the_policy() -> None:
    program = graph(param_dtype="bfloat16")
    plan = make_plan(program, slow_devices(dp=2, tp=2), PlanOptions(algo="megatron"))
    assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in export_plan(
        plan, "parallelize-module", min_expressed=0
    )
    alone = make_plan(program, slow_devices(tp=2), PlanOptions(algo="megatron", batch_axis=None))
    text = export_plan(alone, "hf-tp-plan", min_expressed=0)
    assert "DTYPE = 'float32'\nAUTOCAST = 'bfloat16'" in text


def test_parameters_are_the_master_weights() -> None:
    with pytest.raises(OptionError, match="the parameters are the master weights already"):
        make_plan(
            graph(param_dtype="bfloat16"), slow_devices(a=4), PlanOptions(master_weights=True)
        )
