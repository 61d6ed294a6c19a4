"""Steps of a config's model that are divided into micro-batches."""

from functools import partial
from pathlib import Path

import pytest

from autoshard.errors import OptionError
from autoshard.graph import load_graph
from autoshard.plan import PlanOptions
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named
from autoshard.requests.steps import DividedStep, divide_step
from tests.support.configs import write_config


def divided(folder: Path, batch: int, **options: object) -> tuple[DividedStep, list[int]]:
    """A step on two devices, and the batch sizes that were exported."""
    export, exported = partial(export_named, write_config(folder)), list[int]()

    def counted(shape: BatchShape) -> bytes:
        exported.append(shape.batch_size)
        return export(shape)

    shape = BatchShape(batch_size=batch, seq_length=128)
    return divide_step(counted, shape, PlanOptions(**options), 2), exported


def test_a_batch_that_fits_is_not_divided(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 16)
    assert (found.number, found.seconds) == (1, {})
    # With one sample for each device, to see what all need, and as a whole.
    assert exported == [2, 16]


def test_a_batch_of_a_sample_for_each_device_is_exported_once(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 2)
    assert (found.number, exported) == (1, [2])


def test_the_program_is_that_of_the_chosen_micro_batch(tmp_path: Path) -> None:
    found, exported = divided(tmp_path, 64, memory_budget="8MB")
    assert found.number > 1
    assert found.seconds[found.number] == min(found.seconds.values())
    program = load_graph(found.graph)
    assert program.values[program.inputs[-1].name].shape[0] == 64 // found.number
    assert len(exported) == len(set(exported)) <= 3


def test_a_batch_of_one_sample_is_not_divided(tmp_path: Path) -> None:
    found, _ = divided(tmp_path, 1, memory_budget="2MB")
    assert found.number == 1


def test_a_memory_that_no_number_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no number of micro-batches of a batch of 64"):
        divided(tmp_path, 64, memory_budget="200kB")
