"""Predictions of published runs: a few rows of each kind, reasons, malformed files, the report."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.graph import graph_digest, load_graph
from autoshard.mesh import get_topology
from autoshard.planner import make_plan
from benchmarks.published import cells, report
from benchmarks.published.accuracy import category_of
from benchmarks.published.fitted import FITTED
from benchmarks.published.hardware import preset_of, topology_of
from benchmarks.published.layouts import layers_of_stages, request_of
from benchmarks.published.memory import memory_table
from benchmarks.published.models import Batch, Dimensions, export_decoder
from benchmarks.published.predictions import Prediction, predict
from benchmarks.published.programs import program
from benchmarks.published.public_models import dimensions_of
from benchmarks.published.rows import ROWS, Row, RowError, read_rows

ROOT = Path(__file__).parent.parent

FSDP, TENSOR, OPTIMIZER, DECODING = "llmf-018", "dgxc-047", "nemo22-5b-16gpu", "gptfast-2-7B-tp8"
MAMBA = "bridge-011"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read_rows(ROWS)}


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.published", *map(str, arguments)]
    return subprocess.run(  # noqa: S603  our own module
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0].texts))
        writer.writeheader()
        writer.writerows([dict(row.texts) for row in rows])
    return path


@pytest.mark.thorough
def test_rows_of_several_categories_are_predicted_and_others_have_a_reason(
    rows: dict[str, Row], tmp_path: Path
) -> None:
    chosen = [rows[name] for name in (FSDP, TENSOR, OPTIMIZER, DECODING, MAMBA)]
    out = tmp_path / "out.json"
    done = run(write(tmp_path / "rows.csv", chosen), "--json", out, "--processes", "1")
    assert done.returncode == 0, done.stderr
    *predicted, refused = json.loads(out.read_text(encoding="utf-8"))
    assert [one["id"] for one in predicted] == [FSDP, TENSOR, OPTIMIZER, DECODING]
    for one, row in zip(predicted, chosen, strict=False):
        assert one["published_s"] == row.seconds
        assert (one["trust"], one["category"]) == (row["trust"], row["category"])
        assert 0.3 < one["predicted_s"] / one["published_s"] < 3
        assert "reason" not in one
    assert refused["predicted_s"] is None
    assert "state-space" in refused["reason"]


@pytest.mark.thorough
def test_a_repeated_layer_has_the_plan_of_an_export_of_all_layers() -> None:
    dims = Dimensions(256, 6, 4, 2, 512, 1024, experts=8, active=2, dense_layers=1, dense_ffn=512)
    batch = Batch(8, 128)
    whole = load_graph(export_decoder(dims, batch, "float32"))
    made = program(dims, batch, "float32")
    assert {i.target for i in made.inputs} == {i.target for i in whole.inputs}
    plans = [make_plan(graph, "2x4", algo="fsdp2") for graph in (whole, made)]
    assert plans[0].costs is not None
    assert plans[1].costs is not None
    assert plans[1].costs.total == pytest.approx(plans[0].costs.total, rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("sequences", [1, 8, 96])
def test_programs_of_other_batches_are_those_of_their_own_exports(sequences: int) -> None:
    dims = Dimensions(256, 3, 4, 2, 512, 1024, experts=8, active=2)
    batch = Batch(sequences, 128)
    own = load_graph(export_decoder(dims, batch, "float32"))
    assert graph_digest(program(dims, batch, "float32")) == graph_digest(own)


@pytest.mark.thorough
def test_a_program_whose_number_of_sequences_torch_export_fixes_has_that_of_the_batch(
    rows: dict[str, Row],
) -> None:
    request = request_of(rows["bridge-053"])
    graph = program(request.dims, request.batch, request.reduce_dtype)
    assert graph.values["ids"].shape == (request.batch.sequences, request.batch.tokens)


def test_a_pipeline_row_is_pinned_to_its_stages_and_axes(rows: dict[str, Row]) -> None:
    found = request_of(rows["dgxc-064"])
    assert [(a.name, a.size) for a in found.mesh.axes] == [("pp", 8), ("dp", 16), ("tp", 8)]
    options = found.options
    assert (options.constraints.algo, options.constraints.distributed_optimizer) == (
        "megatron-sp",
        True,
    )
    assert (
        options.pipeline.stages,
        options.pipeline.stages_per_rank,
        options.training.micro_batches,
    ) == (96, 12, 16)
    assert options.pipeline.balance == (1,) * 96


def test_rows_run_with_the_kernels_of_their_source(rows: dict[str, Row]) -> None:
    """Llm-foundry is eager, and FlashAttention is Triton's but in its latest table."""
    found = {name: request_of(rows[name]).options for name in ("llmf-036", FSDP, "dgxc-064")}
    kernels = [(x.runtime.execution, x.runtime.attention_kernel) for x in found.values()]
    assert kernels[:2] == [("eager", "flash_attention_1"), ("eager", "flash_attention_2")]
    assert kernels[2][0] == "compile"


def changed(row: Row, **texts: str) -> Row:
    return Row({**row.texts, **texts})


def test_hardware_is_as_stated(rows: dict[str, Row]) -> None:
    stated = changed(
        rows[FSDP], gpu_type="H100-96GB-500W", gpus_per_node="4", interconnect="800 Gbps/node"
    )
    found, usual = topology_of(stated), topology_of(rows[FSDP])
    assert found is not None
    assert usual is not None
    assert [(x.size, x.bandwidth) for x in found.levels] == [(4, 450e9), (None, 25e9)]
    assert [(x.size, x.bandwidth) for x in usual.levels] == [(8, 450e9), (None, 50e9)]
    assert found.device.kernels is not None
    assert 0.8 < found.device.kernels.clock < 0.9
    assert found.device.memory_bandwidth < usual.device.memory_bandwidth
    assert topology_of(changed(rows[FSDP], gpu_type="V100")) is None


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("none", None),
        ("full (every block)", ()),
        ("selective, 1/8 of layers", ("layers.7", "layers.15", "layers.23")),
        ("selective (op)", ("layers.*.mlp",)),
        ("selective (core attention)", None),
    ],
)
def test_checkpoints_are_as_stated(
    rows: dict[str, Row], text: str, modules: tuple[str, ...] | None
) -> None:
    options = request_of(changed(rows[FSDP], act_ckpt=text)).options
    assert options.memory.activation_checkpointing == ("never" if modules is None else "always")
    assert options.memory.checkpointed_modules == (modules or ())


def test_layers_are_divided_as_equally_as_possible() -> None:
    assert layers_of_stages(70, 12) == (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
    assert sum(layers_of_stages(61, 8)) == 61


def test_rows_that_fitted_constants_are_shipped(rows: dict[str, Row]) -> None:
    assert all(name in rows for names in FITTED.values() for name in names)


def test_the_shipped_rows_name_their_sources(rows: dict[str, Row]) -> None:
    assert len(rows) == 490
    assert all(row["source"] for row in rows.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"gpus"', '"cards"', 1), "no column gpus"),
        (lambda text: text + '"one","cell"\n', "line 3: the row has not as many cells"),
        (lambda text: text + text.split("\n", 1)[1], "the id 'llmf-018' occurs twice"),
        (lambda text: text.replace('"0.55698"', '"soon"'), "step_time_s is 'soon'"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(
    rows: dict[str, Row], tmp_path: Path, change: object, message: str
) -> None:
    assert callable(change)
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, list(rows[FSDP].texts), quoting=csv.QUOTE_ALL, lineterminator="\n"
        )
        writer.writeheader()
        writer.writerow(dict(rows[FSDP].texts))
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(RowError, match=message):
        read_rows(path)


@pytest.mark.thorough
def test_the_command_refuses_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("one,two\n", encoding="utf-8")
    done = run(path)
    assert done.returncode == 2
    assert "the first line has no column id" in done.stderr


def test_the_report_has_errors_and_a_plot(rows: dict[str, Row]) -> None:
    found = predict([rows[FSDP], rows["llmf-017"], rows[MAMBA]], 1)
    assert "| A | FSDP | 2 | 2 |" in report.summary_table(found)
    table = report.cross_validation_table(found)
    assert "| bridge | none | 0 | 1 | 0 |" in table
    # Neither of the two rows fitted a constant, so both errors count.
    assert "| llmf | none | 0 | 2 | 2 |" in table
    assert "| 1 | state-space" in report.reasons_table(found)
    assert report.plot(found).count("<title>") == 2
    assert report.percentile([0.1, 0.2, 0.3], 0.9) == 0.3


def test_more_stages_than_layers_leave_the_ends_empty(rows: dict[str, Row]) -> None:
    assert layers_of_stages(126, 128) == (0, *[1] * 126, 0)
    options = request_of(rows["bridge-126"]).options
    assert options.pipeline.balance is None
    assert (len(options.pipeline.cuts), options.pipeline.stages) == (127, 128)
    assert (options.pipeline.cuts[0], options.pipeline.cuts[-1]) == (
        "before:layers.0",
        "after:layers.125",
    )


@pytest.mark.thorough
def test_error_bars_are_made_from_predictions_without_planning(
    rows: dict[str, Row], tmp_path: Path
) -> None:
    chosen = [row for row in rows.values() if row["trust"] == "A" and row.seconds]
    fsdp = [row for row in chosen if row["category"] == "FSDP" and "H100" in row["gpu_type"]][:10]
    predicted = [
        {"id": row.id, "predicted_s": (row.seconds or 0) / (1 + share), "published_s": row.seconds}
        for row, share in zip(fsdp, [0.01 * n for n in range(10)], strict=True)
    ]
    few = [row for row in chosen if row["category"] == "FSDP" and "A100" in row["gpu_type"]][:4]
    predicted += [{"id": row.id, "predicted_s": row.seconds} for row in few]
    path = tmp_path / "out.json"
    path.write_text(json.dumps(predicted), encoding="utf-8")
    document = tmp_path / "page.md"
    tables = ("errors", "ranking", "memory", "reasons", "accuracy")
    document.write_text("\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in tables))
    (tmp_path / "pictures").mkdir()
    done = run("--predictions", path, "--document", document, "--details", tmp_path)
    assert done.returncode == 0, done.stderr
    written = csv.DictReader((tmp_path / "predictions.csv").read_text("utf-8").splitlines())
    assert {one["row"] for one in written} == {one["id"] for one in predicted}
    assert "| llmf |" in (tmp_path / "predictions_by_source.md").read_text(encoding="utf-8")
    line = "| data parallel or FSDP | Hopper | 10 | +- 8.0% |"
    assert line in document.read_text(encoding="utf-8").splitlines()
    assert "Ampere" not in document.read_text(encoding="utf-8").split("<!-- accuracy -->")[1]


@pytest.mark.thorough
def test_rows_have_the_category_of_the_plans_in_their_layout(rows: dict[str, Row]) -> None:
    for name in (FSDP, TENSOR, DECODING):
        request = request_of(rows[name])
        graph = program(request.dims, request.batch, request.reduce_dtype)
        preset = preset_of(rows[name])
        assert preset is not None
        mesh = replace(request.mesh, topology=get_topology(preset))
        plan = make_plan(graph, mesh, request.options)
        assert plan.performance is not None
        assert f"({category_of(rows[name])}, " in plan.performance.comparison


@pytest.mark.parametrize(
    ("texts", "group"),
    [
        ({"dp_variant": "FSDP2 (FSDP 8)"}, 8),
        ({"dp_variant": "FSDP2"}, 16),
        ({"dp_variant": "HSDP", "gpus_per_node": "4"}, 4),
        ({"dp_variant": "FSDP HYBRID_SHARD"}, 8),
        ({"dp_variant": "hybrid shard, replicate 2"}, 8),
        ({"dp_variant": "DeepSpeed ZeRO stage 3"}, 16),
    ],
)
def test_groups_of_ranks_share_parameters_as_stated(
    rows: dict[str, Row], texts: dict[str, str], group: int
) -> None:
    row = changed(rows[FSDP], gpus="16", global_batch_seqs="192", **texts)
    found = {axis.name: axis.size for axis in request_of(row).mesh.axes}
    assert found == {"shard": group} | ({"replicate": 16 // group} if group < 16 else {})


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("full AC", ()),
        ("every block", ()),
        ("no AC", None),
        ("none; activations", None),
        ("selective AC (op)", ("layers.*.mlp",)),
        ("selective mla_up_proj,mlp,moe", ("layers.*.mlp",)),
        ("selective layernorm,moe_act", ("layers.*.mlp.experts.out",)),
        ("every other layer", tuple(f"layers.{i}" for i in range(1, 24, 2))),
        ("selective, 1 of 12 blocks", ("layers.11", "layers.23")),
    ],
)
def test_other_spellings_of_recomputation_are_read(
    rows: dict[str, Row], text: str, modules: tuple[str, ...] | None
) -> None:
    assert cells.recomputed(changed(rows[FSDP], act_ckpt=text), 24) == modules


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("1,024", 1024), ("8.0", 8), ("8192 (packed)", 8192), ("8 or 16", None), ("", None)],
)
def test_numbers_have_separators_and_remarks(
    rows: dict[str, Row], text: str, number: int | None
) -> None:
    assert changed(rows[FSDP], gpus=text).number("gpus") == number


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("NVIDIA H100 SXM5 80GB", "h100-sxm"),
        ("H200-141GB", "h200-sxm"),
        ("A100 40GB", "a100-sxm-40gb"),
        ("GB200", "gb200-nvl72"),
        ("H100 PCIe", None),
        ("GH200", None),
    ],
)
def test_gpus_are_found_in_other_spellings(
    rows: dict[str, Row], text: str, preset: str | None
) -> None:
    assert preset_of(changed(rows[FSDP], gpu_type=text)) == preset


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("InfiniBand 4 x 400 Gb/s per node", 25e9),
        ("RoCE 400 Gbps per GPU", 50e9),
        ("4 Omni-Path links per node", 6.25e9),
        ("64x400G switches", 50e9),
    ],
)
def test_networks_are_as_stated(rows: dict[str, Row], text: str, bandwidth: float) -> None:
    found = topology_of(changed(rows[FSDP], interconnect=text))
    assert found is not None
    assert found.levels[-1].bandwidth == bandwidth


def test_a_mixture_of_experts_of_unknown_dimensions_is_no_dense_model(rows: dict[str, Row]) -> None:
    unknown = changed(rows[TENSOR], category="MoE/EP", model="Other-30B-A3B", hf_config="")
    assert dimensions_of(unknown) is None
    small = changed(unknown, model="GPT-OSS 20B", hf_config="openai/gpt-oss-20b", layers="")
    known = dimensions_of(small)
    assert known is not None
    assert (known.experts, known.layers) == (32, 24)


def test_tensor_parallel_ranks_share_matrices_of_experts_by_default(rows: dict[str, Row]) -> None:
    """Megatron-Core's default, which notes and the recipes of Megatron-Bridge change."""
    shared = {name: cells.shares_matrices(rows[name]) for name in ("dgxc-071", "moezoo-2")}
    assert shared == {"dgxc-071": True, "moezoo-2": False}
    assert not cells.shares_matrices(rows["bridge-101"])
    assert cells.shares_matrices(rows["dgxc-189"])


def test_other_stacks_are_not_megatron(rows: dict[str, Row]) -> None:
    for framework, expected in (("NeMo AutoModel", False), ("NeMo 2", True), ("torchtitan", False)):
        assert cells.is_megatron(changed(rows[FSDP], framework=framework)) is expected


def test_tokens_are_sent_once_to_each_node(rows: dict[str, Row]) -> None:
    """32 ranks of 8 a node are on 4 nodes, of which a token's 8 experts are on most."""
    found = request_of(changed(rows["moezoo-2"], compile_kernels_attn="DeepEP")).options
    assert found.runtime.dispatch_share == pytest.approx(4 / 8 * (1 - (3 / 4) ** 8))


def test_torchtitan_divides_the_batch_of_a_rank_for_a_pipeline(rows: dict[str, Row]) -> None:
    row = changed(
        rows[TENSOR],
        framework="torchtitan",
        sp="",
        micro_batch_seqs_per_device="4",
        global_batch_seqs=str(4 * int(rows[TENSOR]["gpus"]) // 32),
        tp="8",
        pp="4",
        cp="1",
        vpp="",
    )
    request = request_of(row)
    assert request.options.training.micro_batches == 4
    assert request.options.constraints.algo == "megatron-sp"
    assert "micro-batches of 1 sequence" in request.assumed


def test_memory_of_runs_is_compared_with_that_of_their_devices(rows: dict[str, Row]) -> None:
    found = [Prediction(rows[FSDP], 1.0, {}, peak=peak) for peak in (40 * 10**9, 160 * 10**9)]
    table = memory_table(found)
    assert table.startswith("Predicted to exceed the memory of their GPU: 1 of 2 runs.")
    assert "| FSDP | 2 | 1 | 187% | 187% | llmf-018 187% |" in table
