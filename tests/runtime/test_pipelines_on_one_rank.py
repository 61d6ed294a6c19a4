"""All stages of a pipeline in one process."""

from collections.abc import Callable

import pytest
import torch
from runtime.cases.pipelines import check_gradients, in_stages, joined_batch, loss_of
from support.comparison import close
from torch.distributed.device_mesh import init_device_mesh

from autoshard.runtime import parallelize

NUM_RANKS = 1


def check_all_stages(name: str) -> None:
    """A plan for four devices runs on one, without messages."""
    case = in_stages(name, "", "1F1B", 4)
    case.prepare()
    (reference, _), parts = case.built()
    losses = torch.stack([loss_of(reference(**part)) for part in parts])
    losses.mean().backward()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("one",))
    planned = parallelize(case.built()[0][0], case.plan, mesh)
    assert len(planned) == 4
    close(planned.step(**joined_batch(parts)), losses.detach().mean().double(), "loss")
    check_gradients(planned, reference)
    with torch.no_grad():
        result = planned(**joined_batch(parts))
    close(loss_of(result), losses.detach().mean(), "loss in inference")


CASES: dict[str, Callable[[], None]] = {"gpt2": lambda: check_all_stages("gpt2")}


@pytest.mark.matrix(8)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
