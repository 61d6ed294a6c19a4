"""Constraints, explain, compare and search on the command line."""

import json
import re
from pathlib import Path

import pytest
from support.command_line import autoshard
from support.models import meta, residuals
from typer.testing import Result

from autoshard.cli import ExitCode
from autoshard.cli.rendering.output import console
from autoshard.graph import export_model, graph_from_json
from autoshard.plan import Plan, PlanOptions


@pytest.fixture(scope="module")
def plans(archive: Path) -> tuple[Path, Path]:
    """The plan of choice, and one with a pin."""
    paths = archive.with_name("free.json"), archive.with_name("pinned.json")
    free = autoshard("plan", archive, "--mesh", "2,4", "-o", paths[0])
    pin = "node:linear=S(0),S(1)"
    pinned = autoshard("plan", archive, "--mesh", "2,4", "--pin", pin, "-o", paths[1])
    assert (free.exit_code, pinned.exit_code) == (0, 0)
    return paths


def words(result: Result) -> str:
    """The output without the line breaks that a narrow terminal makes."""
    return " ".join(result.output.replace("│", " ").split())


def test_options_arrive_in_the_plan(archive: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    fields = {"name": "megatron-core", "bucket_bytes": "1GB", "activation_overlap": 0.5}
    profile.write_text(json.dumps(fields))
    result = autoshard(
        *("plan", archive, "--mesh", "2,4", "--json", "--algo", "megatron"),
        *("--pin", "parameter:up.*=*,S(0)", "--pin", "parameter:down.bias=I,I"),
        *("--pin", "input:x=Shard(dim=0),*", "--pin", "output:0=*,*"),
        *("--forbid", "all_to_all", "--forbid", "reduce_scatter@axis1"),
        *("--forbid", "halo_exchange:activations@axis0"),
        *("--batch-axis", "axis0", "--skip-fully-replicated"),
        *("--reshard-after-forward", "never", "--activation-checkpointing", "never"),
        *("--master-weights", "--state-dtype", "bfloat16", "--overlap"),
        *("--execution", "compile", "--runtime", profile),
    )
    assert Plan.from_json(result.stdout).options == PlanOptions(
        algo="megatron",
        pins={
            "parameters": {"up.*": "*,S(0)", "down.bias": "I,I"},
            "inputs": {"x": "Shard(dim=0),*"},
            "outputs": {"0": "*,*"},
        },
        forbid=[
            {"kind": "all_to_all"},
            {"kind": "reduce_scatter", "axis": "axis1"},
            {"kind": "halo_exchange", "of": "activations", "axis": "axis0"},
        ],
        batch_axis="axis0",
        skip_fully_replicated=True,
        reshard_after_forward="never",
        activation_checkpointing="never",
        master_weights=True,
        overlap=True,
        state_dtype="bfloat16",
        execution="compile",
        runtime="megatron-core",
        bucket_bytes=1_000_000_000,
        activation_overlap=0.5,
        comparisons=True,
    )


def test_axes_that_share_work_arrive_in_the_plan(archive: Path) -> None:
    result = autoshard(
        *("plan", archive, "--mesh", "2,2", "--json", "--skip-fully-replicated-on", "axis1"),
        *("--pin", "parameter:*=Shard(*),Shard(*)"),
    )
    plan = Plan.from_json(result.stdout)
    assert plan.options.constraints.skip_fully_replicated == ("axis1",)
    assert plan.options.constraints.pins.parameters == {"*": "Shard(*),Shard(*)"}
    assert "skip_fully_replicated 'axis1'" in str(plan.certificate.statement)


def test_options_of_pipelines_arrive_in_the_plan(archive: Path) -> None:
    result = autoshard(
        *("plan", archive, "--mesh", "2,2", "--json", "--cut", "before:down"),
        *("--schedule", "GPipe", "--micro-batches", "2"),
    )
    plan = Plan.from_json(result.stdout)
    assert plan.options == PlanOptions(
        cuts=("before:down",), schedule="GPipe", micro_batches=2, comparisons=True
    )
    assert [len(stage.parameters) for stage in plan.stages] == [2, 2]
    refused = autoshard("plan", archive, "--mesh", "2,2", "--balance", "1,2", "--stages", "3")
    assert "balance lists 2 stages" in words(refused)
    automatic = autoshard(
        *("plan", archive, "--mesh", "2,2", "--json", "--stages", "2", "--balance", "parameters"),
        *("--stages-per-rank", "1", "--sub-meshes", "any", "--micro-batches", "4"),
    )
    assert Plan.from_json(automatic.stdout).options == PlanOptions(
        stages=2,
        balance="parameters",
        stages_per_rank=1,
        sub_meshes="any",
        micro_batches=4,
        comparisons=True,
    )


def test_modules_to_recompute_arrive_in_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "layers.pt2"
    model, inputs = meta(residuals, layers=3)
    path.write_bytes(export_model(model, (), inputs))
    arguments = ("plan", path, "--mesh", "2,2", "--json", "--activation-checkpointing", "always")
    named = ("--checkpointed-module", "layers.0", "--checkpointed-module", "*.2")
    result = autoshard(*arguments, *named)
    plan = Plan.from_json(result.stdout)
    assert plan.options.memory.checkpointed_modules == ("layers.0", "*.2")
    (stage,) = plan.stages
    program = graph_from_json(stage.program)
    modules = [program.nodes[program.numbers[one.first]].module for one in stage.checkpoints]
    assert [".".join(module.split(".")[:2]) for module in modules] == ["layers.0", "layers.2"]
    wrong = autoshard(*arguments, "--checkpointed-module", "blocks.*")
    assert wrong.exit_code == 1
    assert "--checkpointed-module: no module matches 'blocks.*'; there are layers," in words(wrong)


def test_a_conflict_is_told(archive: Path) -> None:
    pins = ("--pin", "node:linear=P,R", "--forbid", "all_reduce", "--forbid", "reduce_scatter")
    result = autoshard("plan", archive, "--mesh", "2,2", *pins)
    assert result.exit_code == ExitCode.NO_PLAN
    assert "these options contradict each other: pin of node 'linear'" in words(result)


def test_explain_prices_alternatives(plans: tuple[Path, Path]) -> None:
    result = autoshard("explain", plans[0], "linear", "--limit", "3")
    assert result.exit_code == 0
    for word in ("aten.linear.default", "chosen", "regret", "more"):
        assert word in words(result)
    pinned = autoshard("explain", plans[1], "linear", "--limit", "1000")
    assert "pin of node" in words(pinned)


def test_compare_shows_what_changed(plans: tuple[Path, Path]) -> None:
    result = autoshard("compare", *plans)
    assert result.exit_code == 0
    for word in (
        "Operators that differ",
        "linear",
        "Shard(0), Shard(1)",
        "communication",
        "activations",
    ):
        assert word in words(result)
    assert "the plans are the same" in autoshard("compare", plans[0], plans[0]).output


def test_search_ranks_meshes_and_writes_the_best(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)
    path = tmp_path / "best.json"
    arguments = ("--devices", "4", "--mode", "inference", "--topology", "h100-sxm", "-o", path)
    result = autoshard("search", archive, *arguments)
    assert result.exit_code == 0
    for mesh in ("axis0=4", "axis0=2 x", "axis1=2"):
        assert mesh in words(result)
    best = Plan.from_json(path.read_bytes())
    assert best.mesh.num_devices == 4
    assert best.options.mode == "inference"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--pin", "weights"], "KIND:NAME=LAYOUT"),
        (["--pin", "weight:x=R,R"], "KIND:NAME=LAYOUT"),
        (["--pin", "parameter:nothing=R,R"], "no such name"),
        (["--pin", "input:x=R,R", "--pin", "input:x=S(0),R"], "given twice"),
        (["--forbid", "broadcast"], "--forbid: Input should be"),
        (["--forbid", "all_gather@pp"], "'pp'"),
        (["--forbid", "all_gather:weights"], "'parameters' or 'activations'"),
        (["--batch-axis", "pp"], "'pp'"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--mesh", "two"], "is not a mesh"),
        (["--mesh", "0"], "size 0"),
        (["--mesh", "2", "--axes", "a,b"], "axis names"),
        (["--mesh", "2", "--topology", "abacus"], "abacus"),
        (["--intra-bandwidth", "-1", "--inter-bandwidth", "1"], "bandwidth"),
        (["--topology", "h100-sxm", "--intra-bandwidth", "1GB/s"], "leave one"),
        (["--memory-budget", "much"], "much"),
    ],
)
def test_bad_options_are_named(archive: Path, arguments: list[str], complaint: str) -> None:
    mesh = [] if "--mesh" in arguments else ["--mesh", "2,2"]
    result = autoshard("plan", archive, *mesh, *arguments)
    assert result.exit_code == 1
    assert "error:" in result.output
    assert complaint in result.output


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--mode", ["training", "inference"]),
        ("--optimizer", ["adamw", "sgd"]),
        ("--algo", ["optimal", "megatron"]),
        ("--activation-checkpointing", ["auto", "never", "always"]),
        ("--reshard-after-forward", ["auto", "never", "always"]),
        ("--state-dtype", ["float32", "float16", "bfloat16"]),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(
    archive: Path, option: str, choices: list[str]
) -> None:
    result = autoshard("plan", archive, "--mesh", "2,2", option, "luck")
    assert result.exit_code == 2
    assert "luck" in result.output
    assert all(choice in result.output for choice in choices)


def test_bad_questions_are_named(archive: Path, plans: tuple[Path, Path]) -> None:
    for arguments, complaint in (
        (("explain", plans[0], "sideways"), "no node"),
        (("compare", plans[0], archive), "mlp.pt2"),
    ):
        result = autoshard(*arguments)
        assert result.exit_code == 1
        assert complaint in result.output


def test_what_is_recomputed_is_shown(archive: Path) -> None:
    again = autoshard(
        *("plan", archive, "--mesh", "2,4", "--reshard-after-forward", "always"),
        *("--pin", "parameter:*weight=S(0),S(0)", "--pin", "input:x=S(0),S(0)"),
    )
    assert again.exit_code == 0
    assert re.search(r"Backward gathers \d of 4 gathered parameters again", words(again))
    assert "recomputation in backward" in words(again)


def test_overlap_is_shown(archive: Path) -> None:
    pins = ("--pin", "parameter:*=I", "--batch-axis", "axis0")
    apart = autoshard("plan", archive, "--mesh", "4", *pins, "--no-overlap")
    beside = autoshard("plan", archive, "--mesh", "4", *pins)
    searched = autoshard("search", archive, "--devices", "2")
    assert (apart.exit_code, beside.exit_code, searched.exit_code) == (0, 0, 0)
    assert "overlap of communication" not in words(apart)
    assert "overlapped" in words(searched)
    beside_costs = autoshard("plan", archive, "--mesh", "4", *pins, "--format", "csv")
    assert re.search(r"overlap of communication with compute,-[0-9.e-]+,", beside_costs.output)


def test_the_layout_of_another_framework_arrives_in_the_plan(archive: Path) -> None:
    result = autoshard(
        *("plan", archive, "--mesh", "8", "--json", "--no-comparisons"),
        *("--like", "megatron tp=2 zero1"),
    )
    assert result.exit_code == 0, result.output
    made = Plan.from_json(result.stdout)
    assert [(axis.name, axis.size) for axis in made.mesh.axes] == [("dp", 4), ("tp", 2)]
    assert (made.options.constraints.algo, made.options.constraints.distributed_optimizer) == (
        "megatron",
        True,
    )
    wrong = autoshard("plan", archive, "--mesh", "8", "--like", "megatron tp=3")
    assert "TP 3 = 3 ranks do not divide 8 devices" in words(wrong)
