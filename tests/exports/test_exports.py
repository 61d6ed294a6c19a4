"""Text of exports, made from the plan alone; other tests run it on ranks."""

import csv
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from support.meshes import slow_devices
from support.models import Case, gpt2, graph_of, llama, meta, mlp, small_graph
from torch import nn
from torch.nn import functional

from autoshard.checker import check_plan
from autoshard.errors import OptionError, PlanError
from autoshard.exports import EXPORT_TARGETS, export_plan, expressed_share, read_megatron
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan

BATCH = {"inputs": {"*": "S(0),*"}}


def planned(build: Any, pins: dict[str, Any] | None = None, **axes: int) -> Plan:
    options = PlanOptions(pins=pins or {})
    plan = make_plan(small_graph(build), slow_devices(**axes), options)
    assert plan.found, plan.reason
    return plan


@pytest.fixture(scope="module")
def data_and_tensor() -> Plan:
    """Llama with its rows over dp, and weights over tp."""
    options = PlanOptions(algo="megatron")
    return make_plan(small_graph(llama), slow_devices(dp=2, tp=2), options)


@pytest.mark.parametrize("target", EXPORT_TARGETS)
def test_every_export_starts_with_what_it_expresses(data_and_tensor: Plan, target: str) -> None:
    text = export_plan(data_and_tensor, target, min_expressed=0)
    if target == "json":
        first, comment = next(iter(json.loads(text).items()))
        assert first == "comment"
    else:
        comment = text[: text.index("\n\n") if "\n\n" in text else None]
        assert text.startswith("# ")
    assert data_and_tensor.id[:12] in comment
    assert comment.removeprefix("# ").startswith("Expresses ")
    assert "Not expressed" in comment


def test_exports_say_that_micro_batches_are_left_out() -> None:
    options = PlanOptions(algo="megatron", micro_batches=4)
    plan = make_plan(small_graph(llama), slow_devices(dp=2, tp=2), options)
    for target in set(EXPORT_TARGETS) - {"json", "csv"}:
        assert "the 4 micro-batches of a step" in export_plan(plan, target, min_expressed=0), target


@pytest.mark.parametrize("target", EXPORT_TARGETS)
def test_a_plan_is_always_exported_alike(data_and_tensor: Plan, target: str) -> None:
    again = Plan.from_json(data_and_tensor.to_json())
    assert export_plan(again, target, min_expressed=0) == export_plan(
        data_and_tensor, target, min_expressed=0
    )


def test_exports_need_no_torch(data_and_tensor: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(data_and_tensor.to_json())
    code = (
        "import sys; from pathlib import Path\n"
        "from autoshard.exports import EXPORT_TARGETS, export_plan\n"
        "from autoshard.plan import Plan\n"
        f"plan = Plan.from_json(Path({str(path)!r}).read_text())\n"
        "assert all(export_plan(plan, x, min_expressed=0) for x in EXPORT_TARGETS)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own program


def test_layers_that_are_sharded_alike_share_a_line(data_and_tensor: Plan) -> None:
    text = export_plan(data_and_tensor, "parallelize-module", min_expressed=0)
    assert "'model.layers.*.mlp.up_proj': ColwiseParallel(output_layouts=Shard(-1))" in text
    assert "'model.layers.*.self_attn.q_proj': ColwiseParallel(output_layouts=inner)" in text
    assert "# Tensor parallelism over tp, FSDP2 over dp, from" in text
    assert "SHARD_AXIS = 'dp'" in text


def test_layers_that_are_sharded_otherwise_have_lines_of_their_own() -> None:
    pins = {"parameters": {"model.layers.1.mlp.*": "I"}, "inputs": {"*": "R"}}
    plan = planned(llama, pins, tp=4)
    code = export_plan(plan, "parallelize-module", min_expressed=0)
    rules = export_plan(plan, "hf-tp-plan", min_expressed=0)
    assert "mlp" not in "".join(line for line in code.splitlines() if "layers.*." in line)
    assert "model.layers.0.mlp.up_proj" in code
    assert "'model.layers.*.mlp.up_proj': 'replicate'" in rules
    assert "model.layers.*.mlp.up_proj.weight" in rules[: rules.index("TP_SIZE =")]


def test_rows_and_columns_around_what_slices_cannot_pass_are_gathered() -> None:
    """Eight ranks cannot share out four key and value heads, so attention is not local."""
    text = export_plan(planned(llama, {"inputs": {"*": "R"}}, tp=8), "hf-tp-plan", min_expressed=0)
    assert "'model.layers.*.mlp.down_proj': 'rowwise'," in text
    assert "'model.layers.*.self_attn.q_proj': 'colwise'," not in text


class Between(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.scale = nn.Parameter(torch.ones(1))
        self.between = between

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.up(x)
        match self.between:
            case "a function":
                return (self.down(torch.relu(y) * self.scale.detach()),)
            case "a view":
                return (self.down(y.view(-1, 8, 16).flatten(1)),)
            case "a parameter":
                return (self.down(y * self.scale),)
            case "an output":
                return self.down(torch.relu(y)), y
            case "the second layer":
                return (self.down(torch.cat([self.down(y)] * 2, -1)),)
            case _:
                return (functional.linear(self.down(y), self.up.weight),)


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        ("a function", "Shard(-1)"),
        ("a view", "inner"),
        ("a parameter", "Replicate()"),
        ("an output", "Replicate()"),
        ("the second layer", "Replicate()"),
    ],
)
def test_slices_stay_where_the_model_can_work_on_them(between: str, kept: str) -> None:
    """Slices of a whole parameter's reader, for one, would leave its gradient partial."""
    pins = {
        "inputs": {"*": "R"},
        "outputs": {"*": "R"},
        "parameters": {"up.*": "S(0)", "down.weight": "S(1)", "down.bias": "I"},
        "nodes": {"linear": "R S(0) S(0) -> S(1)"},
    }
    graph = graph_of((Between(between), {"x": torch.randn(16, 64)}))
    plan = make_plan(graph, slow_devices(tp=4), PlanOptions(pins=pins))
    assert plan.found, plan.reason
    text = export_plan(plan, "parallelize-module", min_expressed=0)
    assert f"'up': ColwiseParallel(output_layouts={kept})" in text
    assert f"'down': RowwiseParallel(input_layouts={kept})" in text


def test_what_other_modules_read_is_left_alone() -> None:
    graph = graph_of((Between("nothing"), {"x": torch.randn(16, 64)}))
    pins = {"inputs": {"*": "R"}, "parameters": {"*.weight": "S(0)"}}
    options = PlanOptions(pins=pins)
    plan = make_plan(graph, slow_devices(tp=4), options)
    assert plan.found, plan.reason
    comment, code = export_plan(plan, "parallelize-module", min_expressed=0).split("\n\n", 1)
    assert "- parameters of up, which code of other modules reads" in comment
    assert "'up'" not in code
    assert "'down': " in code


def test_fsdp_names_each_parameter_that_it_shards_otherwise() -> None:
    pins = {"inputs": {"*": "S(0),R"}, "parameters": {"up.weight": "S(0),S(0)", "*": "S(0),*"}}
    plan = planned(wide_mlp, pins, dp=2, tp=2)
    comment, code = export_plan(plan, "fsdp2", min_expressed=0).split("\n\n", 1)
    words = comment.replace("\n# ", " ").replace("  ", " ")
    assert (
        "up.weight: (Shard(0), Shard(0)), tp innermost in the plan, (Shard(0), Replicate) here"
    ) in words
    assert "SHARD_AXIS = 'dp'" in code
    assert "'up.weight': 0," in code


def wide_mlp() -> Case:
    return mlp(16, 64, 128, 64)


def test_uneven_shares_are_left_out_where_fsdp_has_none() -> None:
    pins = {
        "inputs": {"*": "S(0)"},
        "parameters": {"up.weight": "S(1)", "down.weight": "S(0)", "*.bias": "I"},
    }
    plan = planned(lambda: mlp(16, 66, 128, 66), pins, a=4)
    comment, code = export_plan(plan, "fsdp2", min_expressed=0).split("\n\n", 1)
    assert "- up.weight: (Shard(1)) in the plan, (Replicate) here" in comment
    assert "'up.weight'" not in code
    assert "'down.weight': 0," in code


@pytest.mark.parametrize(
    ("axes", "pins", "degrees"),
    [
        ({"a": 4}, {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}, (1, 4, 1, 1)),
        ({"a": 4}, {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}}, (4, 1, 1, 1)),
        ({"a": 4}, {"inputs": {"*": "R"}}, (1, 1, 4, 1)),
        ({"a": 4}, {"inputs": {"*": "S(1)"}}, (1, 1, 1, 4)),
        (
            {"a": 2, "b": 2},
            {"parameters": {"*": "I,S(0)"}, "inputs": {"*": "S(0),S(0)"}},
            (2, 2, 1, 1),
        ),
    ],
)
def test_torchtitan_gets_the_degrees_of_the_plan(
    axes: dict[str, int], pins: dict[str, Any], degrees: tuple[int, ...]
) -> None:
    settings = tomllib.loads(
        export_plan(planned(llama, pins, **axes), "torchtitan", min_expressed=0)
    )
    parallelism = settings["parallelism"]
    names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    assert tuple(parallelism[f"{n}_degree"] for n in (*names, "context_parallel")) == degrees
    assert parallelism["pipeline_parallel_degree"] == 1
    assert settings["activation_checkpoint"] == {"mode": "none"}


def test_torchtitan_is_told_what_runs_again() -> None:
    pins = {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}
    options = {
        "pins": pins,
        "reshard_after_forward": "always",
        "activation_checkpointing": "always",
    }
    mesh = slow_devices(a=4)
    plan = make_plan(small_graph(llama), mesh, PlanOptions(**options))
    settings = tomllib.loads(export_plan(plan, "torchtitan", min_expressed=0))
    assert settings["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert settings["activation_checkpoint"]["mode"] == "full"
    assert "'model.layers.0': True," in export_plan(plan, "fsdp2", min_expressed=0)


@pytest.mark.parametrize(
    ("axes", "pins", "expected"),
    [
        ({"a": 4}, {"parameters": {"*": "I"}, "inputs": {"*": "S(0)"}}, ["1", "1", "1"]),
        ({"a": 4}, {"inputs": {"*": "R"}}, ["4", "1", "1"]),
        ({"a": 4}, {"inputs": {"*": "S(1)"}}, ["1", "1", "4"]),
        (
            {"a": 2, "b": 2},
            {"parameters": {"*": "I,S(0)"}, "inputs": {"*": "S(0),S(0)"}},
            ["1", "1", "1", "2"],
        ),
    ],
)
def test_megatron_gets_the_degrees_of_the_plan(
    axes: dict[str, int], pins: dict[str, Any], expected: list[str]
) -> None:
    arguments = megatron_arguments(planned(llama, pins, **axes))
    assert [a for a in arguments if not a.startswith("--")] == expected
    assert "--use-megatron-fsdp" not in arguments
    assert "--sequence-parallel" not in arguments


def test_megatron_is_told_of_sequences_and_recomputation() -> None:
    options = {
        "pins": {"inputs": {"*": "R"}, "nodes": {"*add*": "S(1)"}},
        "activation_checkpointing": "always",
    }
    plan = make_plan(small_graph(llama), slow_devices(a=4), PlanOptions(**options))
    arguments = megatron_arguments(plan)
    assert {"--sequence-parallel", "--recompute-granularity"} <= set(arguments)


def megatron_arguments(plan: Plan) -> list[str]:
    """Arguments as Bash passes them on."""
    code = (
        export_plan(plan, "megatron", min_expressed=0) + 'printf "%s\n" "${MEGATRON_ARGUMENTS[@]}"'
    )
    done = subprocess.run(["bash", "-euc", code], check=True, capture_output=True, text=True)  # noqa: S603, S607  ours
    return done.stdout.split()


PIPELINES = {
    "1F1B": (
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 "
            "--micro-batch-size 2 --global-batch-size 16"
        ),
        {"stages": 2, "stages_per_rank": 1, "schedule": "1F1B", "balance": (1, 1)}
        | {"algo": "megatron", "activation_checkpointing": "never"},
    ),
    "interleaved": (
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--num-layers 4 --micro-batch-size 1 --global-batch-size 16 "
            "--use-distributed-optimizer --lr 0.1"
        ),
        {"stages": 4, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "balance": (1,) * 4}
        | {"algo": "megatron", "distributed_optimizer": True, "activation_checkpointing": "never"},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_arguments_of_megatron_become_a_plan_and_come_back(name: str) -> None:
    arguments, expected = PIPELINES[name]
    found = read_megatron(arguments, num_ranks=8)
    options = {"micro_batches": 4, **expected}
    assert found.options == PlanOptions(**options)
    graph = graph_of(meta(llama, layers=expected["stages"]))
    plan = make_plan(graph, slow_devices(**dict(found.axes)), found.options)
    assert plan.found, plan.reason
    given = dict(zip(arguments.split()[::2], arguments.split()[1::2], strict=False))
    back = read_megatron(megatron_arguments(plan), num_ranks=8)
    assert back.axes == found.axes
    fields = ("stages", "stages_per_rank", "schedule", "micro_batches", "activation_checkpointing")
    for field in fields:
        assert back.options.value(field) == found.options.value(field)
    assert given["--micro-batch-size"] in megatron_arguments(plan)
    assert "where stages begin, model.layers." in export_plan(
        plan, "megatron", min_expressed=0
    ).replace("\n# ", " ")
    with pytest.raises(PlanError, match="which only these exports support: megatron"):
        export_plan(plan, "fsdp2", min_expressed=0)


@pytest.mark.parametrize(
    ("arguments", "balance"),
    [
        ("--num-layers 6 --account-for-embedding-in-pipeline-split", None),
        ("--num-layers 8", (2, 2, 2, 2)),
        ("--num-layers 61 --decoder-first-pipeline-num-layers 16", (16, 15, 15, 15)),
        ("--num-layers 9 --decoder-last-pipeline-num-layers 3", (2, 2, 2, 3)),
        (
            (
                "--num-layers 126 --account-for-embedding-in-pipeline-split "
                "--account-for-loss-in-pipeline-split"
            ),
            (31, 32, 32, 31),
        ),
    ],
)
def test_layers_of_uneven_pipelines_of_megatron(
    arguments: str, balance: tuple[int, ...] | None
) -> None:
    text = f"--pipeline-model-parallel-size 4 {arguments}"
    if balance is None:
        with pytest.raises(OptionError, match="cannot be divided by 4"):
            read_megatron(text, num_ranks=4)
    else:
        assert read_megatron(text, num_ranks=4).options.pipeline.balance == balance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensor-model-parallel-size 3", "8 ranks cannot be divided by 3"),
        ("--tensor-model-parallel-size two", "invalid int value"),
        ("--context-parallel-size 0", "is 0, which is not positive"),
        ("--pipeline-model-parallel-layout Et|tL", "give `cuts` instead"),
        ("--micro-batch-size 3 --global-batch-size 16", "16 sequences cannot be divided by 24"),
        ("--num-layers-per-virtual-pipeline-stage 2", "needs --num-layers"),
    ],
)
def test_wrong_arguments_of_megatron_are_named(arguments: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_megatron(arguments, num_ranks=8)


def test_what_options_cannot_fix_is_said() -> None:
    found = read_megatron(
        "--sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 2 --bf16 "
        "--recompute-granularity selective --use-megatron-fsdp",
        num_ranks=8,
    )
    assert [text.partition(":")[0] for text in found.chosen] == [
        "selective recomputation",
    ]
    assert found.axes == (("dp", 2), ("ep", 2), ("cp", 2))
    assert found.options.constraints.algo == "megatron-sp"
    assert found.options.constraints.distributed_optimizer
    assert found.options.memory.reshard_after_forward == "always"
    assert found.options.training.master_weights
    assert found.options.training.accumulation_dtype == "float32"
    assert read_megatron("", num_ranks=1).axes == (("dp", 1),)
    recomputed = read_megatron("--recompute-granularity full", num_ranks=1)
    assert recomputed.options.memory.activation_checkpointing == "always"
    assert not recomputed.chosen


def test_tables_hold_every_tensor_at_rest() -> None:
    plan = planned(gpt2, tp=4)
    placed = {i.target: list(i.placements) for i in plan.stages[0].inputs}
    document = json.loads(export_plan(plan, "json"))
    assert {name: row["placements"] for name, row in document["tensors"].items()} == placed
    assert len(document["nodes"]) == len(plan.stages[0].nodes)
    lines = [x for x in export_plan(plan, "csv").splitlines() if not x.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert {row["name"]: row["placements"] for row in rows} == {
        name: " ".join(texts) for name, texts in placed.items()
    }
    (head,) = (row for row in rows if row["name"] == "lm_head.weight")
    assert (head["aliases"], head["shape"]) == ("transformer.wte.weight", "64x32")


@pytest.mark.parametrize(
    ("target", "pins", "axes", "complaint"),
    [
        ("hf-tp-plan", {"inputs": {"*": "S(0)"}}, {"a": 4}, "does not shard the batch"),
        ("fsdp2", {"inputs": {"*": "R"}}, {"a": 4}, "no module shards the batch; export to"),
        (
            "fsdp2",
            {"inputs": {"*": "R"}, "nodes": {"up": "S(0)"}},
            {"a": 4},
            "up is the first that shards the batch, over a; before it, ranks have all rows of x",
        ),
        ("fsdp2", {"inputs": {"*": "S(0),S(0),S(0)"}}, {"a": 2, "b": 2, "c": 2}, "at most two"),
        (
            "fsdp2",
            {"inputs": {"*": "S(0),S(0)"}, "parameters": {"*": "S(0),I"}},
            {"a": 2, "b": 2},
            "in the opposite order",
        ),
        ("parallelize-module", {"parameters": {"*": "I"}}, {"a": 4}, "is not tensor-parallel"),
        ("torchtitan", {"inputs": {"*": "R,R"}}, {"a": 2, "b": 2}, "tensor parallelism"),
    ],
)
def test_what_a_target_cannot_say_at_all_is_an_error(
    target: str, pins: dict[str, Any], axes: dict[str, int], complaint: str
) -> None:
    plan = planned(wide_mlp, pins, **axes)
    with pytest.raises(PlanError, match=complaint):
        export_plan(plan, target, min_expressed=0)


@pytest.mark.parametrize("target", ["fsdp2", "hf-tp-plan"])
def test_an_export_that_expresses_little_is_an_error(data_and_tensor: Plan, target: str) -> None:
    found = expressed_share(data_and_tensor, target)
    assert found is not None
    assert found.share < 0.5
    with pytest.raises(PlanError) as error:
        export_plan(data_and_tensor, target)
    message = str(error.value)
    assert f"{target} would express {found}; that is less than 50 %" in message
    assert "Not expressed: the compute of model.layers.*" in message
    assert f"exportable_to={target!r}" in message
    assert export_plan(data_and_tensor, target, min_expressed=found.share)


MADE_FOR: list[tuple[str, Any, dict[str, int]]] = [
    ("fsdp2", llama, {"a": 2, "b": 2}),
    ("fsdp2", gpt2, {"a": 4}),
    ("parallelize-module", llama, {"dp": 2, "tp": 2}),
    ("parallelize-module", gpt2, {"dp": 2, "tp": 2}),
    ("hf-tp-plan", llama, {"tp": 4}),
    ("hf-tp-plan", gpt2, {"tp": 4}),
    ("torchtitan", llama, {"dp": 2, "tp": 2}),
    ("torchtitan", gpt2, {"dp": 2, "tp": 2}),
    ("torchtitan", gpt2, {"dp": 4}),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("target", "build", "axes"), MADE_FOR)
def test_plans_made_for_a_target_are_expressed(
    target: str, build: Any, axes: dict[str, int]
) -> None:
    options = PlanOptions(exportable_to=target)
    graph, mesh = small_graph(build), slow_devices(**axes)
    plan = make_plan(graph, mesh, options)
    assert plan.found, plan.reason
    assert not check_plan(plan, graph)
    found = expressed_share(plan, target)
    assert found is not None
    assert found.share == 1, found.missing
    assert found.operators == {node.name for node in plan.stages[0].nodes}
    assert export_plan(plan, target, min_expressed=1).startswith("# Expresses 100 % of the plan")
    free = make_plan(graph, mesh, PlanOptions())
    assert free.certificate.objective is not None
    assert plan.certificate.bound is not None
    assert free.certificate.objective <= plan.certificate.objective
    assert f"exportable_to {target!r}" in plan.certificate.statement


def test_plans_for_torchtitan_are_sequence_parallel_between_sharded_layers() -> None:
    roles = ("shard", "tensor")
    options = PlanOptions(exportable_to="torchtitan", export_roles=roles)
    graph = small_graph(llama)
    plan = make_plan(graph, slow_devices(dp=2, tp=2), options)
    (stage,) = plan.stages
    nodes = {node.name: node for node in stage.nodes}
    norms = [node.name for node in graph.nodes if "layernorm" in node.module]
    assert norms
    assert all(nodes[name].outputs == ("S(0),S(1)",) for name in norms)
    layouts = {p.target: p.layout for p in stage.parameters}
    assert layouts["model.layers.0.self_attn.q_proj.weight"] == "S(0),S(0);1>0"
    assert layouts["model.layers.0.self_attn.o_proj.weight"] == "S(0),S(1)"
    assert layouts["model.norm.weight"] == "S(0),I"


def test_a_plan_that_the_target_cannot_express_is_found_by_the_checker() -> None:
    graph, mesh = small_graph(llama), slow_devices(a=4)
    plan = make_plan(graph, mesh, PlanOptions())
    claimed = plan.options.with_values(exportable_to="fsdp2")
    findings = check_plan(plan.model_copy(update={"options": claimed}), graph)
    assert any("exportable_to 'fsdp2'" in finding for finding in findings)


@pytest.mark.parametrize(
    ("target", "axes", "batch_axis", "complaint"),
    [
        ("fsdp2", {"a": 2, "b": 2, "c": 2}, None, "at most 2 data-parallel axes"),
        ("hf-tp-plan", {"a": 2, "b": 2}, None, "one axis, which shards layers"),
        ("parallelize-module", {"a": 4}, "a", "needs an axis that shards layers"),
        ("fsdp2", {"a": 3}, None, "divides the batch among 3 ranks, but it has 4 rows"),
    ],
)
def test_meshes_that_a_target_cannot_use_are_errors(
    target: str, axes: dict[str, int], batch_axis: str | None, complaint: str
) -> None:
    given = {"exportable_to": target, "batch_axis": batch_axis}
    with pytest.raises(OptionError, match=complaint):
        make_plan(small_graph(llama), slow_devices(**axes), PlanOptions(**given))


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(OptionError, match=r"choose one of .*parallelize-module"):
        export_plan(planned(wide_mlp, a=2), "pipedream")


def test_a_document_without_a_plan_is_no_export() -> None:
    options = PlanOptions(memory_budget=1000)
    plan = make_plan(small_graph(wide_mlp), slow_devices(a=2), options)
    with pytest.raises(PlanError, match="no plan to export"):
        export_plan(plan, "json")


@pytest.mark.parametrize(
    ("options", "axes", "wanted"),
    [
        ({"algo": "ddp"}, {"dp": 4}, {"multi_gpu": True, "use_fsdp": False}),
        ({"algo": "fsdp2"}, {"dp": 4}, {"use_fsdp": True, "use_parallelism_config": False}),
        (
            {"algo": "hsdp"},
            {"far": 2, "near": 2},
            {
                "use_fsdp": True,
                "use_parallelism_config": True,
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
            },
        ),
        (
            {
                "algo": "fsdp2",
                "reshard_after_forward": "always",
                "activation_checkpointing": "always",
            },
            {"dp": 4},
            {"fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True},
        ),
    ],
)
def test_accelerate_reads_its_settings(
    options: dict[str, Any], axes: dict[str, int], wanted: dict[str, Any], tmp_path: Path
) -> None:
    plan = make_plan(small_graph(llama), slow_devices(**axes), PlanOptions(**options))
    path = tmp_path / "accelerate.yaml"
    path.write_text(export_plan(plan, "accelerate", min_expressed=0))
    parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    found, _, _ = _validate_launch_command(parsed)
    assert found.num_processes == 4
    assert {name: getattr(found, name) for name in wanted} == wanted
    if found.use_fsdp:
        assert found.fsdp_version == 2
    # Settings that say nothing else express all of such a plan.
    assert expressed_share(plan, "accelerate").share == 1.0


def test_accelerate_leaves_out_other_axes(data_and_tensor: Plan) -> None:
    text = export_plan(data_and_tensor, "accelerate", min_expressed=0)
    assert "parallelism over tp, whose ranks are left out" in text
    assert "num_processes: 2\n" in text
    with pytest.raises(PlanError, match="accelerate"):
        export_plan(data_and_tensor, "accelerate")
