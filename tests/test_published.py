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
from benchmarks.published import report
from benchmarks.published.accuracy import category_of
from benchmarks.published.fitted import FITTED
from benchmarks.published.hardware import preset_of, topology_of
from benchmarks.published.layouts import layers_of_stages, request_of
from benchmarks.published.models import Batch, Dimensions, export_decoder
from benchmarks.published.predictions import Prediction, predict
from benchmarks.published.programs import program
from benchmarks.published.ranking import ranked, ranking_table
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


@pytest.mark.parametrize("sequences", [1, 8, 96])
def test_programs_of_other_batches_are_those_of_their_own_exports(sequences: int) -> None:
    dims = Dimensions(256, 3, 4, 2, 512, 1024, experts=8, active=2)
    batch = Batch(sequences, 128)
    own = load_graph(export_decoder(dims, batch, "float32"))
    assert graph_digest(program(dims, batch, "float32")) == graph_digest(own)


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
    assert (options.algo, options.distributed_optimizer) == ("megatron-sp", True)
    assert (options.stages, options.stages_per_rank, options.micro_batches) == (96, 12, 16)
    assert options.balance == (1,) * 96


def test_rows_run_with_the_kernels_of_their_source(rows: dict[str, Row]) -> None:
    """Llm-foundry is eager, and FlashAttention is Triton's but in its latest table."""
    found = {name: request_of(rows[name]).options for name in ("llmf-036", FSDP, "dgxc-064")}
    kernels = [(x.execution, x.attention_kernel) for x in found.values()]
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
    assert options.activation_checkpointing == ("never" if modules is None else "always")
    assert options.checkpointed_modules == (modules or ())


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


def test_the_command_refuses_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("one,two\n", encoding="utf-8")
    done = run(path)
    assert done.returncode == 2
    assert "the first line has no column id" in done.stderr


def test_the_report_has_errors_a_ranking_and_a_plot(rows: dict[str, Row]) -> None:
    found = predict([rows[FSDP], rows["llmf-017"], rows[MAMBA]], 1)
    assert "| A | FSDP | 2 | 2 |" in report.summary_table(found)
    table = report.cross_validation_table(found)
    assert "| bridge | none | 0 | 1 | 0 |" in table
    # Neither of the two rows fitted a constant, so both errors count.
    assert "| llmf | none | 0 | 2 | 2 |" in table
    assert "| 1 | state-space" in report.reasons_table(found)
    assert report.plot(found).count("<title>") == 2
    assert report.percentile([0.1, 0.2, 0.3], 0.9) == 0.3


def test_layouts_of_one_model_on_one_cluster_are_ranked(rows: dict[str, Row]) -> None:
    """moezoo has four layouts: 2 and 3 take equally long, 4 longer, and 5 longest."""
    layouts = [rows[f"moezoo-{number}"] for number in (2, 3, 4, 5)]
    seconds = (18.0, 25.0, 24.0, 30.0)
    found = [Prediction(row, s, {}) for row, s in zip(layouts, seconds, strict=True)]
    pairs = {
        (pair.faster.row.id[-1], pair.slower.row.id[-1]): pair.is_right for pair in ranked(found)
    }
    assert pairs == {
        ("2", "4"): True, ("2", "5"): True, ("3", "4"): False, ("3", "5"): True, ("4", "5"): True
    }  # fmt: skip
    assert ranking_table(found).startswith("Ranked right: 4 of 5 pairs (80%).")
    assert ranked(found[:2]) == [], "two layouts are too few"
    again = replace(found[0], row=Row({**found[0].row.texts, "id": "again", "step_time_s": "30"}))
    assert ranked([*found[:2], again]) == [], "only two differ"


def test_more_stages_than_layers_leave_the_ends_empty(rows: dict[str, Row]) -> None:
    assert layers_of_stages(126, 128) == (0, *[1] * 126, 0)
    options = request_of(rows["bridge-126"]).options
    assert options.balance is None
    assert (len(options.cuts), options.stages) == (127, 128)
    assert (options.cuts[0], options.cuts[-1]) == ("before:layers.0", "after:layers.125")


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
    tables = ("errors", "sources", "cross-validation", "ranking", "reasons", "rows", "accuracy")
    document.write_text("\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in tables))
    (tmp_path / "pictures").mkdir()
    done = run("--predictions", path, "--document", document)
    assert done.returncode == 0, done.stderr
    line = "| data parallel or FSDP | Hopper | 10 | +- 8.0% |"
    assert line in document.read_text(encoding="utf-8").splitlines()
    assert "Ampere" not in document.read_text(encoding="utf-8").split("<!-- accuracy -->")[1]


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
