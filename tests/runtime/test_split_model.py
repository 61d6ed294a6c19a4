"""`split_model`: stages that run one after the other in one process, as the model runs."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from graph.test_stages import CASES, backward
from runtime.cases.experts import mixtral
from runtime.cases.pipeline_cuts import FEATURES, ROWS, Branching, Stack, linear
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of, mlp, residuals
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard import pipeline, split_model
from autoshard.errors import ArgumentTypeError, OptionError, PlanError
from autoshard.graph import MixedPrecision, export_model, load_graph
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan


def run(stages: list[fx.GraphModule], arguments: dict[str, Any]) -> Any:
    """The result of the last stage, each called with what the one before returns."""
    sent: tuple[Any, ...] = ()
    for stage in stages:
        read = list(signature(stage.forward).parameters)[len(sent) :]
        result = stage(*sent, **{name: arguments[name] for name in read})
        sent = result if isinstance(result, tuple) else (result,)
    return result


def check(stages: list[fx.GraphModule], model: nn.Module, same: nn.Module, user: Any) -> None:
    """Results, gradients and buffers are those of the model."""
    torch.manual_seed(7)
    results = pytree.tree_leaves(run(stages, user))
    torch.manual_seed(7)
    expected = pytree.tree_leaves(same(**user))
    for actual, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, str):
            assert actual == wanted
        else:
            torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(backward(model, results), backward(same, expected))
    for name, buffer in same.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize("build", CASES)
def test_stages_compute_what_the_model_does(build: Callable[[], Case]) -> None:
    model, user = build()
    model.train()
    same = deepcopy(model)
    stages = (
        split_model(model, 3, (), user)
        if list(model.parameters())
        else split_model(model, PlanOptions(cuts=("at:cos",)), (), user)
    )
    assert len(stages) == (3 if list(model.parameters()) else 2)
    check(stages, model, same, user)


def test_stages_have_the_tensors_of_the_model_under_its_names() -> None:
    model, user = gpt2()
    stages = split_model(model, 3, (), user)
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            assert tensor is model.state_dict(keep_vars=True)[name]
            found[name] = tensor
    own = model.state_dict(keep_vars=True)
    assert {id(x) for x in found.values()} == {id(x) for x in own.values()}
    # The embedding is the head too: both stages have the parameter itself.
    tied = [dict(stage.named_parameters()).get("lm_head.weight") for stage in stages]
    assert tied[0] is tied[2] is model.get_parameter("lm_head.weight")
    assert tied[1] is None


def test_opaque_modules_run_and_count_their_calls() -> None:
    model = Stack(Branching)
    same, x = deepcopy(model), torch.randn(ROWS, FEATURES)
    stages = split_model(model, 3, (x,), opaque="auto")
    assert len(stages) == 3
    check(stages, model, same, {"x": x})
    assert model.get_buffer("blocks.3.calls") == 1


def test_experts_run_in_stages() -> None:
    model, same = mixtral("grouped_mm"), mixtral("eager")
    same.load_state_dict(model.state_dict())
    ids = torch.randint(0, 32, (2, 8))
    user = {"input_ids": ids, "labels": ids, "use_cache": False}
    check(split_model(model, 2, (), user), model, same, user)


def test_marks_and_named_cuts_are_those_of_the_options() -> None:
    x = torch.randn(ROWS, FEATURES)
    marked = split_model(Stack(linear, marked=True), PlanOptions(), (x,))
    named = split_model(Stack(linear), PlanOptions(cuts=("before:blocks.1",)), (x,))
    for stages in (marked, named):
        names = [[name.split(".") for name, _ in stage.named_parameters()] for stage in stages]
        held = [{parts[1] for parts in of if parts[0] == "blocks"} for of in names]
        assert held == [{"0"}, {"1", "2", "3"}]


def test_a_plan_of_sharded_stages_is_split_too() -> None:
    case = model, user = residuals()
    plan = make_plan(graph_of(case), slow_devices(pp=2, tp=2), PlanOptions(stages=2))
    assert plan.found, plan.reason
    check(split_model(model, plan), model, deepcopy(model), user)


def test_a_model_on_the_meta_device_is_loaded_stage_by_stage() -> None:
    model, user = mlp()
    with torch.device("meta"):
        empty, _ = mlp()
    first, second = split_model(empty, PlanOptions(cuts=("before:down",)), (), user, device="cpu")
    for stage in (first, second):
        assert all(p.is_meta for p in stage.parameters())
        stage.to_empty(device="cpu").load_state_dict(
            {name: x for name, x in model.state_dict().items() if name in stage.state_dict()}
        )
    torch.testing.assert_close(second(first(**user)), model(**user))


def test_parameters_are_read_in_the_type_of_mixed_precision() -> None:
    model, user = mlp()
    graph = load_graph(export_model(model, (), user, mixed_precision=MixedPrecision("bfloat16")))
    plan = make_plan(graph, slow_devices(pp=2), PlanOptions(stages=2, micro_batches=2))
    first, second = split_model(model, plan)
    result = second(first(**user))
    assert result.dtype is torch.bfloat16
    assert {p.dtype for p in (*first.parameters(), *second.parameters())} == {torch.float32}
    torch.testing.assert_close(result.float(), model(**user), rtol=0.05, atol=0.05)


def test_the_code_of_a_stage_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    stages = split_model(*mlp_in_two())
    stages[0].print_readable()
    code = capsys.readouterr().out
    assert "torch.ops.aten.linear.default(x, up_weight, up_bias)" in code
    assert "down" not in code


def mlp_in_two() -> tuple[nn.Module, PlanOptions, tuple[()], dict[str, Any]]:
    model, user = mlp()
    return model, PlanOptions(cuts=("before:down",)), (), user


def errors() -> Iterator[tuple[Callable[[], object], type[Exception], str]]:
    model, user = mlp()
    options = PlanOptions(memory_budget=1)
    impossible = make_plan(graph_of((model, user)), slow_devices(pp=2), options)
    two = make_plan(graph_of((model, user)), slow_devices(pp=2), PlanOptions(stages=2))
    yield partial(split_model, model, 99, (), user), OptionError, "has at most"
    yield partial(split_model, model, PlanOptions(stages=2), (), user), OptionError, "give balance"
    yield partial(split_model, model, impossible), PlanError, "no plan to split the model by"
    yield (
        partial(split_model, nn.Linear(4, 4), two),
        PlanError,
        "no parameter or buffer 'up",
    )
    yield partial(split_model, model, shard_count=3), ArgumentTypeError, "as second argument"
    yield partial(split_model, model, 0, (), user), OptionError, "stages"


def test_errors_name_the_way_out() -> None:
    for call, kind, text in errors():
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("balance", r"PlanOptions\(balance="),
        ("chunks", r"PlanOptions\(micro_batches="),
        ("n_microbatches", r"PlanOptions\(micro_batches="),
        ("split_spec", "before:layers.4"),
        ("split_policy", "cut_names"),
        ("mb_args", "to export_model"),
        ("mb_kwargs", "to export_model"),
        ("args_chunk_spec", "larger than a micro-batch"),
        ("kwargs_chunk_spec", "larger than a micro-batch"),
        ("output_merge_spec", "join="),
        ("group", "DeviceMesh.from_group"),
        ("worker_map", "not by RPC"),
        ("devices", "that of the device mesh"),
        ("input_device", "moved to the device of the mesh"),
    ],
)
def test_arguments_of_the_seeds_say_where_they_are_now(name: str, text: str) -> None:
    call: Any = pipeline
    with pytest.raises(ArgumentTypeError, match=f"pipeline has no argument '{name}': .*{text}"):
        call(mlp()[0], None, None, **{name: 1})
