"""Shard a model with an operator of your own: its sharding rule is found by running it.

Run it: torchrun --nproc-per-node 4 examples/custom_operator.py
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import discover, export_model, load_graph, make_mesh, make_plan, parallelize


@torch.library.custom_op("example::squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The operator; a real one would call a kernel."""
    return torch.relu(x).square()


@squared_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


squared_relu.register_autograd(
    lambda ctx, grad: 2 * grad * torch.relu(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Mlp(nn.Module):
    """Two layers around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(squared_relu(self.up(x))).square().mean()


def main() -> None:
    """Print the rule, and take one step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device_mesh = init_device_mesh(device, (4,), mesh_dim_names=("device",))
    torch.manual_seed(0)
    model, x = Mlp().to(device), torch.randn(512, 256, device=device)
    found = discover(load_graph(export_model(model, (x,))))
    plan = make_plan(found.graph, make_mesh((4,), axes=("device",), topology="h100-sxm"))
    parallelize(model, plan, device_mesh, custom_operators=["example::squared_relu"])
    model(x).backward()
    if device_mesh.get_rank() == 0:
        print(f"{found.findings[0].rule}; up.weight.grad: {model.up.weight.grad.placements}")


if __name__ == "__main__":
    main()
