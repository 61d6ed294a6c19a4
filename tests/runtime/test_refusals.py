"""Refusals of `parallelize` and pipelines, and where planning has said the same before.

The table has every function of the runtime that raises an error. What depends on the program
and the options alone is refused when the program is read or planned, or is said of the plan.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from torch import nn

import autoshard
from autoshard import errors
from autoshard.errors import ExportError, InputError, OptionError, UnsupportedError
from autoshard.graph import export_model, load_graph
from autoshard.graph.export.model import save_exported
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.report.requirements import requirements

X = torch.randn(8, 8)


class Calls(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


@torch.library.custom_op("refused::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1.0


@shifted.register_fake
def _shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("refused::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> None:
    x.fill_(1.0)


def filled(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    fill(y)
    return (x + y).sum()


def parts(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    mantissa, exponent = torch.empty_like(x), torch.empty(8, 8, dtype=torch.int32)
    torch.frexp(x, out=(mantissa, exponent))
    return mantissa.sum() + exponent.sum()


def resized(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x.detach(), 1.0, out=x.new_empty(0)) + x


def overwritten(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(8, 8, dtype=torch.float64)
    return torch.add(x.detach(), 1.0, out=out) + x


def plan_of(
    function: Callable[[torch.Tensor], Any], mode: str = "inference", **options: Any
) -> Plan:
    """The plan of a layer and a function of its result."""
    graph = load_graph(export_model(Calls(function), (X,)))
    return make_plan(graph, slow_devices(a=2), PlanOptions(**{"mode": mode} | options))


def plan_with_a_constant() -> Plan:
    """The plan of a program that `export_model` did not export, with a constant on meta."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.ones(8, device="meta")]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.tables[0]

    program = torch.export.export(Held(), (X.to("meta"),))
    graph = load_graph(save_exported(program))
    return make_plan(graph, slow_devices(a=2), PlanOptions(mode="inference"))


def pinned_norm() -> Plan:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    options = PlanOptions(pins={"buffers": {"*running_mean": "S(0)"}}, mode="inference")
    graph = load_graph(export_model(model, (X,)))
    return make_plan(graph, slow_devices(a=2), options)


REFUSED: dict[str, tuple[Callable[[], object], type[InputError], str]] = {
    "writes into an argument": (lambda: plan_of(filled), InputError, "refused.fill.default"),
    "several out arguments": (lambda: plan_of(parts), UnsupportedError, "aten.frexp.Tensor_out"),
    "an out argument that is resized": (lambda: plan_of(resized), InputError, "resizes|resize"),
    "an out argument of another type": (
        lambda: plan_of(overwritten),
        UnsupportedError,
        r"writes into float64 what it computes of float32; leave out=\.\.\. away",
    ),
    "results that import": (
        lambda: plan_of(lambda x: defaultdict(list, a=x)),
        UnsupportedError,
        "nest in collections.defaultdict, which a plan cannot read safely",
    ),
    "results of torch": (
        lambda: plan_of(lambda x: x.max(dim=0)),
        ExportError,
        r"forward returns a torch.return_types.max: return its members",
    ),
    "statistics that a pin shards": (pinned_norm, OptionError, "a batch norm updates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_planning_refuses(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


SAID: dict[str, tuple[Callable[[], Plan], str]] = {
    "operators of the model": (
        lambda: plan_of(lambda x: shifted(x) * 2.0),
        r"custom_operators=\['refused::shifted'\]",
    ),
    "constants": (
        plan_with_a_constant,
        r"does not have the values of lifted_tensor_0: .*constants=",
    ),
    "several losses": (
        lambda: plan_of(lambda x: (x.sum(), x.mean()), "training", stages=2, micro_batches=2),
        "2 scalars with gradients, .* pass loss_fn",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_plans_say_what_parallelize_needs(name: str) -> None:
    make, sentence = SAID[name]
    plan = make()
    assert plan.found, plan.reason
    (found,) = requirements(plan)
    assert re.search(sentence, found)
    assert found in " ".join(plan.summary().split())


PLANNED: dict[str, tuple[str, ...]] = {
    "ops.calls: resolve_operator": (
        "writes into an argument",
        "several out arguments",
        "operators of the model",
    ),
    "plan.requirements: several_losses": ("several losses",),
    "graph.tree_specs: spec_nodes": ("results that import",),
    "runtime.checks.call_structure: read_spec": ("results that import", "results of torch"),
    "runtime.pipelining.runner: PipelineRunner._find_loss": ("several losses",),
    "runtime.planned_forward: PlannedForward._find_constant": ("constants",),
    "runtime.program.local_program: _Binder._writes": ("statistics that a pin shards",),
}
"""Refusals of a program and options, with the cases in which planning says the same."""

OF_THE_MODEL = """
runtime.checks.agreement: raised_on_all_ranks check_equal_weights
runtime.checks.plan_runtime: check_runtime
runtime.program.constants: check_held
runtime.program.opaque: bind_module
runtime.parallelize: parallelize _plans _only_stage
runtime.parameters.parameters: check_parameters check_stored_alike
runtime.pipelining.deferred_norms: _check_traced _check_used_once
runtime.pipelining.devices: _check_axes _check_can_be_part
runtime.pipelining.model: _plans_for
runtime.pipelining.model_part: check_held_alike
runtime.pipelining.schedules: _made
runtime.pipelining.stage_module: _Writer._get _Writer._constant _Writer._call_opaque
runtime.pipelining.tied: TiedParameters._check_equal
runtime.planned_forward: PlannedForward._find
runtime.process_groups: process_group make_groups
runtime.program.local_program: _place
runtime.python_state.state: PythonState.check_applies
runtime.torch_check: _check_same_version
"""
"""Refusals of a model, mesh, rank, torch or plan that is passed, which planning cannot know."""

OF_DOCUMENTS = """
ops.calls: check_token
ops.rules.schema_checks: check_against_schema
runtime.program.constants: prepared_inputs
runtime.pipelining.devices: _position
runtime.pipelining.schedules: make_schedule
runtime.pipelining.stage: ScheduledStage.check_local
runtime.pipelining.tied: _distinct
runtime.program.local_program: _Binder._check_inputs _Binder._local_shapes
runtime.python_state.state: _record
runtime.program.sharded_kernels.halo: _only _check
"""
"""Refusals of documents that were written by hand, or changed."""

OF_CALLS = """
runtime.autocast: outside_autocast
runtime.program.buckets: _check_unchanged
runtime.checks.call_checks: ParameterCheck.check _check_stored check_no_transform _compare
runtime.checks.call_structure: CallStructure.flatten
runtime.program.constants: HeldConstant.get
runtime.data_loader: shard_loader _RankRows._rows
runtime.global_tensors.dtensor_handlers: _of_lists _check_whole
runtime.parameters.local_parameters: LocalParameters._check_all _current
runtime.model_class: _saved_whole.save_pretrained _Copying.__reduce_ex__
runtime.program.opaque: bind_module.run bind_module.named _run
runtime.parallelize: Planned._call_replaced Planned._ddp_params_and_buffers_to_ignore
runtime.parallelize: planned_forward
runtime.parameters.parameters: PlannedBuffer.stored
runtime.pipelining.full_states: _model_state_dict _optimizer_state_dict
runtime.pipelining.losses: _called
runtime.pipelining.micro_batches: MicroBatchSplitter.split MicroBatchSplitter._dim
runtime.pipelining.micro_batches: MicroBatchSplitter._dim_of_batch _joined
runtime.pipelining.micro_batches: MicroBatchSplitter._dim_of_target
runtime.pipelining.model: Pipelined.step Pipelined.forward Pipelined.to Pipelined.no_sync
runtime.pipelining.model: Pipelined.to_empty
runtime.pipelining.norms: _total_norm _refuse_lbfgs
runtime.pipelining.runner: PipelineRunner.train PipelineRunner._result
runtime.pipelining.uninitialised: check_initialised
runtime.planned_forward: RngStep.value PlannedForward.__call__ _resized_stage _check_divisible
runtime.python_state.state: PythonState.check
runtime.program.random_numbers: seeded.run dropout_factors
runtime.program.regather: _SavedTensor.unpack
runtime.shards: dtensor_slices
runtime.signature: Arguments.sizes Arguments.check_passed_again check_literal
runtime.signature: _TensorArgument.check _TensorArgument.localize
runtime.parameters.state_dicts: _on_mesh
runtime.unsharded_forward: UnshardedForward._meet
"""
"""Refusals by a call of the planned model, or by a function that is given it."""


def listed(table: str) -> set[str]:
    """The functions of a table, each with its module."""
    lines = (line.split() for line in table.split("\n") if line)
    return {f"{module} {function}" for module, *functions in lines for function in functions}


ROOT = Path(autoshard.__file__).parent
NOT_APPLYING = {"global_tensors"}
"""Packages of the runtime that do not apply plans."""


def refusals() -> set[str]:
    """All functions that raise an error of the library while a plan is applied or runs."""
    files = [path for path in ROOT.glob("runtime/**/*.py") if not NOT_APPLYING & {*path.parts}]
    files.append(ROOT / "runtime" / "global_tensors" / "dtensor_handlers.py")
    files += [ROOT / "ops" / name for name in ("calls.py", "rules/schema_checks.py")]
    found: set[str] = set()
    for path in files:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found.update(f"{module}: {name}" for name in _raising(ast.parse(path.read_text()), ()))
    return found


def _raising(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            error = getattr(errors, ast.unparse(child.exc.func), None)
            if error is not None or ast.unparse(child.exc.func) == "ShapeError":
                yield ".".join(names)
        yield from _raising(child, (*names, child.name) if inside else names)


def test_every_refusal_is_known_before_or_depends_on_what_planning_has_not() -> None:
    tables = [set(PLANNED), *map(listed, (OF_THE_MODEL, OF_DOCUMENTS, OF_CALLS))]
    known = set().union(*tables)
    assert sum(map(len, tables)) == len(known)
    planning = {name for name in PLANNED if not name.startswith(("runtime.", "ops."))}
    assert refusals() - {"ops.calls: check_callable"} == known - planning
    assert {case for cases in PLANNED.values() for case in cases} <= {*REFUSED, *SAID}
