"""MASE's own auto-sharding test cases, from the model to the run on its 2x4 mesh.

On the devices that the mesh assumes by default these models are too small to be worth
cutting, and the plan says so. On slower devices they are cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from support.comparison import check_training
from support.meshes import mase_mesh, slow_mase_mesh
from support.models import Case, bert, graph_of, mlp

from autoshard.plan import Plan
from autoshard.planner import make_plan


@dataclass
class MaseCase:
    """One model, on the default devices or on slow ones."""

    build: Callable[[], Case]
    slow: bool
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        mesh = slow_mase_mesh() if self.slow else mase_mesh()
        self.plan = make_plan(graph_of(self.build()), mesh)
        assert bool(self.plan.collectives) is self.slow

    def __call__(self) -> None:
        model, kwargs = self.build()
        check_training(model, self.plan, kwargs=kwargs)


def mase_mlp() -> Case:
    return mlp(16, 64, 128, 64)


def mase_bert() -> Case:
    return bert(layers=3, hidden=96, sequence=4)


CASES = {
    "mlp": MaseCase(mase_mlp, slow=False),
    "mlp, slow devices": MaseCase(mase_mlp, slow=True),
    "bert": MaseCase(mase_bert, slow=False),
    "bert, slow devices": MaseCase(mase_bert, slow=True),
}
LONG = ("mlp, slow devices", "bert")
"""Each model and each kind of device is in one of the others."""
