"""Steps of a config's model that are divided into micro-batches."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from autoshard.errors import OptionError
from autoshard.graph import load_graph
from autoshard.mesh import make_mesh, resolve_topology
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named
from autoshard.requests.steps import DividedStep, StepDivider
from tests.support.configs import write_config


def divided(
    folder: Path,
    batch: int,
    *,
    devices: int = 2,
    pipelines: bool = True,
    config: Mapping[str, object] = MappingProxyType({}),
    **options: object,
) -> tuple[DividedStep, list[int]]:
    """A step on nodes of two devices, and the batch sizes that were exported."""
    export, exported = partial(export_named, write_config(folder, **config)), list[int]()

    def counted(shape: BatchShape) -> bytes:
        exported.append(shape.batch_size)
        return export(shape)

    divider = StepDivider(
        counted,
        BatchShape(batch_size=batch, seq_length=512 if config else 128),
        PlanOptions(**options),
        devices,
        resolve_topology("h100-sxm", devices, None, 2),
        pipelines=pipelines,
    )
    return divider.divided(), exported


WIDE: Mapping[str, object] = MappingProxyType(
    {
        "hidden_size": 8192,
        "intermediate_size": 16_384,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 512,
    }
)
"""Layers of many parameters for few tokens."""


def number_of(step: DividedStep) -> int:
    return step.options.training.micro_batches


def batch_of(archive: bytes) -> int:
    program = load_graph(archive)
    return program.values[program.inputs[-1].name].shape[0]


def test_a_batch_that_fits_is_not_divided(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 16)
    assert (number_of(found), found.seconds) == (1, {})
    # With one sample for each device, to see what all need, and as a whole.
    assert exported == [2, 16]


def test_a_batch_of_a_sample_for_each_device_is_exported_once(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 2)
    assert (number_of(found), exported) == (1, [2])


def test_the_program_is_that_of_the_chosen_micro_batch(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 64, memory_budget="8MB")
    number = number_of(found)
    assert number > 1
    assert found.seconds[number] == min(found.seconds.values())
    assert batch_of(found.graph) == 64 // number
    assert len(exported) == len(set(exported)) <= 3


def test_a_batch_of_one_sample_is_not_divided(tmp_path: Path) -> None:
    found, _ = divided(tmp_path, 1, memory_budget="2MB")
    assert number_of(found) == 1


def test_a_memory_that_no_number_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no number of micro-batches of a batch of 64"):
        divided(tmp_path, 64, memory_budget="200kB")


def test_a_pipeline_that_is_faster_is_chosen_on_several_nodes(tmp_path: Path) -> None:
    """Between nodes, activations of a stage are less than the gradients of all layers."""
    found, _ = divided(tmp_path, 32, devices=8, config=WIDE)
    assert found.mesh is not None
    assert found.mesh.axis_names[0] == "pp"
    assert found.options.pipeline.stages == "auto"
    number = number_of(found)
    assert batch_of(found.graph) == 32 // number
    planned = make_plan(found.graph, found.mesh, found.options)
    assert planned.pipeline is not None
    assert found.one_stage is not None
    archive, options = found.one_stage
    assert batch_of(archive) == 32 // options.training.micro_batches
    alone = make_plan(archive, make_mesh((4, 2), topology=found.mesh.topology), options)
    assert planned.costs is not None
    assert alone.costs is not None
    assert planned.costs.total < alone.costs.total


@pytest.mark.parametrize(
    "options", [{"pipelines": False}, {"stages": 1}, {"algo": "fsdp2"}, {"devices": 2}]
)
def test_a_pipeline_is_not_compared(options: dict[str, object], tmp_path: Path) -> None:
    given: dict[str, Any] = {"devices": 8, **options}
    found, _ = divided(tmp_path, 32, **given, config=WIDE)
    assert (found.mesh, found.one_stage) == (None, None)
