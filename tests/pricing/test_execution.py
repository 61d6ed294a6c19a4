"""Programs that are compiled, multiplied in float8, or run by another attention kernel."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import Planner, graph_of, llama, meta, small_graph
from torch import Tensor, nn

from autoshard import PlanOptions, make_mesh
from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.lowering.recompute import AS_IN_EAGER
from autoshard.mesh import Device, Mesh
from autoshard.pricing.execution import executions, saving_of

COMPILED = PlanOptions(execution="compile")


class Layers(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """Products with a chain of pointwise operators between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(torch.nn.functional.rms_norm(x, (1024,)))
        y = torch.sigmoid(y).view(-1, 1024) * y.view(-1, 1024)
        return x + self.down(torch.tanh(y)).view(x.shape)


def layers(dtype: torch.dtype = torch.bfloat16) -> Graph:
    module = meta(
        lambda: (
            Layers(Layer() for _ in range(2)).to(dtype),
            {"x": torch.zeros(4, 8, 1024, dtype=dtype)},
        )
    )
    return graph_of(module)


def by_name(graph: Graph, options: PlanOptions) -> dict[str, Any]:
    nodes = zip(graph.nodes, executions(graph, options), strict=True)
    return {node.name: execution for node, execution in nodes}


def test_pointwise_operators_between_products_are_one_kernel() -> None:
    graph = layers()
    found = by_name(graph, COMPILED)
    assert found["sigmoid"].unwritten == {0}
    assert not found["sigmoid"].launches
    # Its other factor was read by the sigmoid already.
    assert found["mul"].unread == {0, 1}
    assert found["mul"].unwritten == {0}
    assert found["tanh"].launches
    assert found["tanh"].unread == {0}
    assert not found["tanh"].unwritten, "a product reads it"
    assert all(x.launches for name, x in found.items() if name.startswith("linear"))


def test_layers_are_compiled_one_by_one() -> None:
    """The sum that ends a layer is read by the next one's norm, in another kernel."""
    graph = layers()
    found = by_name(graph, COMPILED)
    assert found["add"].launches
    assert not found["add"].unwritten
    assert not found["rms_norm_1"].unread


def test_operators_of_named_modules_run_by_themselves() -> None:
    graph = layers()
    found = by_name(
        graph, PlanOptions(runtime="other", execution="compile", eager_modules=("layers.0",))
    )
    inside = {n.name for n in graph.nodes if n.module.startswith("layers.0")}
    assert "mul" in inside
    assert all(found[name].launches and not found[name].is_compiled for name in inside)
    assert not any(found[name].unread or found[name].unwritten for name in inside)
    assert all(x.is_compiled for name, x in found.items() if name not in inside)


def test_backward_computes_again_what_only_its_kernel_reads_if_its_inputs_are_kept() -> None:
    graph = layers()
    # The factors of the product are the result of `up`, which is kept, and its sigmoid. What tanh
    # makes is read by another kernel.
    inside = {"sigmoid", "view", "mul", "sigmoid_1", "view_3", "mul_1"}
    found = saving_of(graph, executions(graph, COMPILED), COMPILED)
    assert found.computed_again == inside
    eager = PlanOptions()
    assert saving_of(graph, executions(graph, eager), eager) == AS_IN_EAGER


class GatedLayers(Layers):
    """Layers with a norm of plain operators in float32 and a gated product, and a loss."""

    def __init__(self) -> None:
        super().__init__(GatedLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.gate, self.up = (nn.Linear(64, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = self.scale * wide.to(x.dtype)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Saved(dict[int, Tensor]):
    """Tensors that autograd saves, by the address of their storage."""

    def nbytes(self, besides: Iterable[Tensor]) -> int:
        """Bytes of the storages, but for those of some tensors."""
        own = {tensor.untyped_storage().data_ptr() for tensor in besides}
        return sum(t.untyped_storage().nbytes() for at, t in self.items() if at not in own)


@contextmanager
def saved_by_pytorch() -> Iterator[Saved]:
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)
@pytest.mark.parametrize(("execution", "most"), [("eager", 1.0), ("compile", 1.07)])
def test_what_is_saved_is_what_pytorch_saves(planned: Planner, execution: str, most: float) -> None:
    """Compiled, PyTorch keeps the inputs of some norms in 16 bit; at most that is overestimated."""
    model = GatedLayers().to(torch.bfloat16)
    x = torch.randn(8, 128, 64).to(torch.bfloat16)
    plan = planned(graph_of((model, {"x": x})), (1,), execution=execution)
    if execution == "compile":
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="aot_eager_decomp_partition")
    with saved_by_pytorch() as saved:
        loss = model(x)
    nbytes = saved.nbytes(besides=(x, *model.parameters()))
    loss.backward()
    predicted = plan.memory.per_micro_batch - loss.nbytes
    assert nbytes <= predicted <= most * nbytes


class ScoredTokens(nn.Module):
    """A product whose 16-bit results are returned, and in float32 the scores of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x)
        flat = scores.float().view(-1, 512)
        return torch.nn.functional.cross_entropy(flat, target.view(-1)), scores


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_loss_saves_scores_as_pytorch_does(planned: Planner, dtype: torch.dtype) -> None:
    model = ScoredTokens().to(dtype)
    x, target = torch.randn(8, 128, 64, dtype=dtype), torch.randint(512, (8, 128))
    inputs = {"x": x, "target": target}
    graph = graph_of((model, inputs))
    found = planned(graph, (1,), execution="compile")
    assert check_plan(found) == ()
    torch._dynamo.reset()
    model.compile(backend="aot_eager_decomp_partition")
    with saved_by_pytorch() as saved:
        loss, scores = model(**inputs)
    nbytes = saved.nbytes(besides=(*inputs.values(), *model.parameters()))
    assert nbytes == pytest.approx(scores.nbytes, rel=0.03), "scores, and statistics of rows"
    assert found.memory.per_micro_batch == pytest.approx(nbytes + loss.nbytes, rel=0.01)
    # At the peak there are the scores and their gradient, nothing of them in float32.
    memory = found.memory
    held = 2 * memory.parameters + memory.optimizer + memory.inputs + 2 * scores.nbytes
    assert memory.peak == pytest.approx(held, rel=0.01)


def test_compiled_inference_fits_what_it_takes(planned: Planner) -> None:
    inputs = {"x": torch.randn(8, 128, 64), "target": torch.randint(512, (8, 128))}
    model = ScoredTokens().to(torch.bfloat16)
    graph = graph_of((model, inputs | {"x": inputs["x"].to(torch.bfloat16)}))
    options: dict[str, Any] = {"mode": "inference", "execution": "compile"}
    memory = planned(graph, (1,), **options).memory
    assert memory.peak < planned(graph, (1,), mode="inference").memory.peak
    assert planned(graph, (1,), **options, memory_budget=memory.peak).found


def test_eager_operators_are_kernels_of_their_own() -> None:
    assert set(executions(layers(), PlanOptions())) == {executions(layers(), PlanOptions())[0]}
    assert all(x.launches and not x.unread for x in executions(layers(), PlanOptions()))


def test_results_of_the_program_are_written() -> None:
    class Returned(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.exp(x)
            return y.view(-1), torch.tanh(y)

    graph = graph_of(meta(lambda: (Returned(), {"x": torch.zeros(4, 8)})))
    found = by_name(graph, COMPILED)
    assert not found["exp"].unwritten
    assert found["tanh"].unread == {0}


@pytest.mark.parametrize(
    "options",
    [
        {"execution": "compile"},
        {"execution": "compile", "activation_checkpointing": "always"},
        {"float8_modules": ("layers.*",)},
        {"foreach_optimizer": True},
        {"fused_gradient_accumulation": True, "micro_batches": 4},
    ],
    ids=str,
)
def test_plans_have_the_costs_of_their_execution(planned: Planner, options: dict[str, Any]) -> None:
    graph = layers()
    plan = planned(graph, (2, 2), runtime="other", **options)
    assert check_plan(plan) == ()
    first = next(iter(options))
    changed = plan.options.with_values(**{first: PlanOptions().value(first)})
    claimed = plan.model_copy(update={"options": changed})
    assert any("takes" in x or "adds up" in x for x in check_plan(claimed))


def test_products_may_save_what_they_read_in_float8(planned: Planner) -> None:
    x = torch.zeros(8, 128, 64, dtype=torch.bfloat16)
    graph = graph_of(meta(lambda: (GatedLayers().to(torch.bfloat16), {"x": x})))
    wide, narrow = (
        planned(
            graph,
            (1,),
            runtime="other",
            float8_modules=("layers.*",),
            float8_saved_inputs=is_narrow,
        )
        for is_narrow in (False, True)
    )
    # Products alone save the scaled norm, once for both that read it, and the gated result.
    saved = 3 * 8 * 128 * (64 + 256)
    assert wide.memory.per_micro_batch - narrow.memory.per_micro_batch == saved
    assert check_plan(narrow) == ()
    claimed = wide.model_copy(update={"options": narrow.options})
    assert any("memory peaks at" in finding for finding in check_plan(claimed))


def test_attention_takes_the_time_of_its_kernel(planned: Planner) -> None:
    graph = small_graph(llama)
    default, same = (
        planned(graph, (1,), runtime="other", attention_kernel=kernel).costs.compute
        for kernel in ("auto", "flash_attention_2")
    )
    assert default == same
    plan = planned(long_attention(), (1,), mode="inference")
    faster = planned(
        long_attention(),
        (1,),
        mode="inference",
        runtime="other",
        attention_kernel="flash_attention_3",
    )
    assert faster.costs.compute < 0.65 * plan.costs.compute
    unfused = planned(
        long_attention(), (1,), mode="inference", runtime="other", attention_kernel="math"
    )
    assert unfused.costs.compute > 4 * plan.costs.compute


def long_attention() -> Graph:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    heads = torch.zeros(1, 16, 8192, 128, dtype=torch.bfloat16, requires_grad=True)
    return graph_of(meta(lambda: (Attention(), {"x": heads})))


def test_compiled_plans_are_faster(planned: Planner) -> None:
    graph = small_graph(llama)
    assert (
        planned(graph, (2,), execution="compile").costs.total
        < 0.6 * planned(graph, (2,)).costs.total
    )


def test_only_named_modules_multiply_in_float8() -> None:
    options = PlanOptions(runtime="other", float8_modules=("layers.1",))
    found = by_name(layers(), options)
    assert {name for name, x in found.items() if x.in_float8} == {"linear_2", "linear_3"}
    assert not any(x.in_float8 for x in executions(layers(torch.float32), options)), "not 16-bit"


def without_kernels(mesh: Mesh, **changes: Any) -> Mesh:
    device: Device = replace(mesh.topology.device, kernels=None, **changes)
    return replace(mesh, topology=replace(mesh.topology, device=device))


def test_what_the_device_does_not_have_is_refused(planned: Planner) -> None:
    graph, mesh = layers(), without_kernels(make_mesh((2,)))
    with pytest.raises(OptionError, match="has rates of none; leave it out"):
        planned(graph, mesh, runtime="other", attention_kernel="flash_attention_2")
    with pytest.raises(OptionError, match="flash_attention_2, flash_attention_3, cudnn_attention"):
        planned(graph, (2,), runtime="other", attention_kernel="flash_attention_4")
    with pytest.raises(OptionError, match=r"float8_modules: .* has no peak_flops of float8"):
        planned(
            graph,
            without_kernels(mesh, peak_flops={"float32": 1e12}),
            runtime="other",
            float8_modules=("*",),
        )


def test_sums_in_the_product_move_fewer_bytes(planned: Planner) -> None:
    """A gradient is not read, and the sum is read while the product runs, but the first time."""
    graph = layers()
    apart, fused = (
        planned(
            graph, (1,), micro_batches=3, runtime="other", fused_gradient_accumulation=fused
        ).costs.optimizer
        for fused in (False, True)
    )
    parameters = 4 * (1024 * 1024 + 1024)
    assert apart - fused == pytest.approx(2 * parameters * 3 * 2 / (3.35e12 * 0.88))


def test_weights_are_cast_once_in_a_step(planned: Planner) -> None:
    """Each of two layers has two weights of 1024 x 1024, read in 16 bits and written twice in 8."""
    always, once = (
        planned(
            *(layers(), (1,)),
            micro_batches=4,
            execution="compile",
            runtime="other",
            float8_modules=("*",),
            float8_weights_once=is_once,
        ).costs.compute
        for is_once in (False, True)
    )
    cast = 4 * 1024 * 1024 * 4 / (3.35e12 * 0.88)
    assert always - once == pytest.approx(3 * cast)


def test_experts_are_launched_one_by_one(planned: Planner) -> None:
    """A product of each of 4 experts forward, and one backward: x has no gradient."""
    graph = graph_of((GroupedProduct(), {"x": torch.randn(64, 32)}))
    together, apart = (
        planned(graph, (1,), runtime="other", expert_launch=seconds).costs.compute
        for seconds in (0.0, 1e-3)
    )
    assert apart - together == pytest.approx(2 * 4 * 1e-3, rel=1e-3)


class GroupedProduct(nn.Module):
    """A product of 16 rows of each of 4 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(16, 65, 16, dtype=torch.int32)
        return torch._grouped_mm((2 * x).bfloat16(), self.weight.bfloat16(), offs=ends)
