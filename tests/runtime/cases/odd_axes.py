"""Rules that were found for dims of odd sizes, on axes of 3, 5 and 6 ranks."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from support import custom_operators
from support.comparison import check_training, device_mesh
from support.meshes import slow_devices
from support.models import graph_of

from autoshard.checker import check_plan
from autoshard.discovery import discover
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan


@dataclass
class Case:
    """A model with operators of its own, of which one is sharded along an odd number of elements.

    Attributes:
        axes: size of each mesh axis by name; ranks that the mesh does not have are idle.
        batch: size of the batch.
        heads: number of heads.
        layout: of the output of the attention, which has the dims batch, heads, sequence, features.
    """

    axes: dict[str, int]
    batch: int
    heads: int
    layout: str
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = discover(graph_of(self._model())).graph
        (name,) = (n.name for n in graph.nodes if n.operator == "shardtest.attend.default")
        options = PlanOptions(pins={"nodes": {name: self.layout}})
        self.plan = make_plan(graph, slow_devices(**self.axes), options)
        assert self.plan.found, self.plan.reason
        assert check_plan(self.plan, graph) == ()

    def __call__(self) -> None:
        if dist.get_rank() >= self.plan.mesh.num_devices:
            device_mesh(self.plan)  # all ranks take part in making its process groups
            return
        torch.manual_seed(0)
        model, inputs = self._model()
        check_training(model, self.plan, kwargs=inputs, custom_operators=["shardtest"])

    def _model(self) -> custom_operators.Case:
        features = 4 * self.heads
        return custom_operators.mixer(batch=self.batch, features=features, heads=self.heads)


CASES = {
    "3 ranks share 3 rows": Case({"dp": 3}, batch=3, heads=2, layout="S(0)"),
    "5 ranks share 5 heads": Case({"tp": 5}, batch=2, heads=5, layout="S(1)"),
    "6 ranks share 6 heads": Case({"tp": 6}, batch=1, heads=6, layout="S(1)"),
    "3 rows and 2 heads": Case({"dp": 3, "tp": 2}, batch=3, heads=2, layout="S(0),S(1)"),
}
