"""Models that torch.export cannot trace: errors that say what to do, and modules kept whole."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.models import gpt2, llama
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autoshard.errors import ExportError, OptionError
from autoshard.graph import (
    OPAQUE_MODULE,
    InputKind,
    Node,
    OpaqueCall,
    OpaqueModule,
    export_model,
    load_graph,
)
from autoshard.report import operator_coverage


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())]


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in x.nonzero()[:, 0].tolist():
            x = x + row
        return x


class Numpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(np.sign(x.detach().numpy()))


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


class Flex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 2, 4, 2)
        return flex_attention(
            heads, heads, heads, score_mod=lambda score, _b, _h, q, k: score + q - k
        )


class Blocks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(2, 2, 4, 2)
        mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 4, 4, device=x.device)
        return flex_attention(heads, heads, heads, block_mask=mask)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama(layers=1)[0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x.long().view(4, 8), use_cache=True)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, *, size: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, size)
        self.inner = nn.ModuleList([inner])

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner[0](self.first(x))


DEPENDS = "depends on the data of a tensor: use torch.where or masks"
CAUSES: dict[type[nn.Module], str] = {
    Branch: DEPENDS,
    Item: DEPENDS,
    Loop: DEPENDS,
    Numpy: r"RuntimeError: \.numpy\(\) is not supported",
    Masked: r"a size in Outer in module 'inner\.0' depends on data \(aten\.index\.Tensor",
    Broken: "RuntimeError",
    Flex: "scaled_dot_product_attention with a mask, which plans shard by heads",
    Blocks: "scaled_dot_product_attention with a mask, which plans shard by heads",
}


@pytest.fixture
def on_stderr() -> Iterator[list[logging.LogRecord]]:
    """What torch's loggers would print."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    vars(handler)["emit"] = records.append
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.mark.parametrize("kind", CAUSES)
def test_the_module_the_line_and_the_way_out_are_named(
    kind: type[nn.Module],
    capsys: pytest.CaptureFixture[str],
    on_stderr: list[logging.LogRecord],
) -> None:
    with pytest.raises(ExportError, match=CAUSES[kind]) as caught:
        export_model(Outer(kind()), (torch.zeros(4, 8),))
    text = str(caught.value)
    assert "in module 'inner.0'" in text
    assert re.search(r"test_untraceable\.py(:|\", line )\d+", text)
    assert "export_model(..., opaque=['inner.0'])" in text
    assert "torch.library.custom_op" in text
    assert len(text) < 1000
    assert "\n" not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert capsys.readouterr().err == ""
    assert not on_stderr


def test_the_line_is_named_in_strict_mode() -> None:
    with pytest.raises(ExportError, match=r"test_untraceable\.py:\d+, `return x if x\.sum"):
        export_model(Outer(Branch()), (torch.zeros(4, 8),), strict=True)


def test_the_whole_model_cannot_be_opaque() -> None:
    with pytest.raises(ExportError, match="move it to a module of its own and keep that whole"):
        export_model(Branch(), (torch.zeros(2),))
    with pytest.raises(ExportError, match="name inner modules"):
        export_model(Branch(), (torch.zeros(2),), opaque=[Branch])


def test_output_of_forward_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.stderr.write("traced\n")
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(ExportError):
        export_model(Talking(), (torch.zeros(2),))
    assert capsys.readouterr().err == "traced\n"


def test_a_cache_that_is_asked_for_is_refused() -> None:
    with pytest.raises(ExportError, match=r"Pass use_cache=False.*StaticCache"):
        export_model(Cached(), (torch.zeros(4, 8),))


@pytest.mark.matrix
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("training", [True, False])
def test_transformers_are_exported_without_their_cache(
    build: Callable[..., Any], *, training: bool
) -> None:
    model, inputs = build()
    inputs.pop("use_cache")
    model.train(training)
    graph = load_graph(export_model(model, (), inputs))
    model.config.use_cache = True
    assert "past_key_values" not in graph.out_spec
    assert graph.num_results == len(graph.outputs) == 2  # loss and logits
    export_model(model, (), inputs)
    assert model.config.use_cache is True


class Device(nn.Module):
    """Names a device in forward, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4, device=self.device) + torch.ones(4, device="cpu")
        return (x.to("cpu") + positions.to(self.device).cpu()).to(self.device, torch.float64)


def test_devices_that_forward_names_do_not_matter(check_equal: Callable[..., Any]) -> None:
    check_equal(Device(), x=torch.ones(2, 4))


class Holder:
    """A plain object with tensors, one of which is a buffer too."""

    def __init__(self, mean: torch.Tensor, steps: torch.Tensor) -> None:
        self.inner = {"mean": [mean]}
        self.pair = (steps,)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.holder = Holder(self.mean, self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (mean,) = self.holder.inner["mean"]
        mean.lerp_(x.mean(0), 0.5)
        return x - mean


def test_buffers_that_plain_objects_hold_are_updated(check_equal: Callable[..., Any]) -> None:
    graph = check_equal(Held(), x=torch.randn(2, 4))
    assert list(graph.updated) == ["b_mean"]


def call_of(model: nn.Module, opaque: list[Any], x: torch.Tensor | None = None) -> Node:
    x = torch.randn(4, 8) if x is None else x
    graph = load_graph(export_model(model, (x,), opaque=opaque))
    (node,) = [n for n in graph.nodes if n.operator == OPAQUE_MODULE]
    assert node.module == "inner.0"
    state = [i.target for i in graph.inputs if i.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    assert sorted(state) == sorted(n for n in model.state_dict())
    return node


class Tower(nn.Module):
    """A product, dropout, and a buffer that counts."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.drop = nn.Dropout(p)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() == torch.inf:
            return x
        self.calls = self.calls + 1
        return self.drop(self.up(x).exp())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_opaque_module_is_one_operator_with_measured_costs(device: str) -> None:
    model = Outer(Tower()).to(device)
    node = call_of(model, [Tower])
    assert node.argument("flops") == 2 * 4 * 8 * 32
    assert node.argument("saved_bytes") == 4 * 32 * 4  # the result of exp
    assert not node.argument("random")
    call = OpaqueCall.from_json(node.argument("call"))
    assert call.state == ("up.weight", "up.bias", "calls")
    assert call.updated == ("calls",)
    assert [shape for shape, _ in call.results] == [(4, 32)]
    assert model.inner[0].calls.device.type == device
    if device == "cpu":
        assert model.inner[0].calls == 0


def test_random_numbers_of_an_opaque_module_are_noticed() -> None:
    model, x = Outer(Tower(0.5)), torch.zeros(4, 8)
    before = torch.get_rng_state()
    assert call_of(model, [Tower], x).argument("random") is True
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
    assert not call_of(Outer(Tower(0.5)).eval(), [Tower]).argument("random")


def test_declared_results_and_costs_need_no_run() -> None:
    class Never(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    entry = OpaqueModule("inner.0", outputs=lambda x: {"made": x.new_empty(3)}, flops=7.0)
    node = call_of(Outer(Never()), [entry])
    assert node.argument("flops") == 7.0
    assert [s for s, _ in OpaqueCall.from_json(node.argument("call")).results] == [(3,)]


class Literal(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x, float(x.detach().sum())


class Inplace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class Mixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Picky(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not these\nnumbers")


@pytest.mark.parametrize(
    ("inner", "along_batch", "message"),
    [
        (Literal(), False, r"the opaque module 'inner\.0' \(Literal\): it returns a float"),
        (Inplace(), False, "writes into an argument"),
        (Picky(), False, r"ValueError: not these\).*OpaqueModule\(\.\.\., outputs="),
        (Mixed(), True, "its rows depend on each other"),
        (Masked(), True, "results without the batch as dim 0"),
        (Tower(), True, "updates buffers, so it cannot run along the batch"),
    ],
)
def test_what_cannot_be_opaque(inner: nn.Module, *, along_batch: bool, message: str) -> None:
    entry = OpaqueModule(type(inner), along_batch=along_batch)
    with pytest.raises(ExportError, match=message):
        export_model(Outer(inner), (torch.randn(4, 8),), opaque=[entry])


def test_unknown_modules_and_dynamic_sizes_are_refused() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ExportError, match=r"no module 'iner\.0' to keep whole; similar.*inner\.0"):
        export_model(Outer(Tower()), (x,), opaque=["iner.0"])
    with pytest.raises(ExportError, match=r"no module .*Branch.* to keep whole"):
        export_model(Outer(Tower()), (x,), opaque=[Branch])
    dynamic = {"x": {0: torch.export.Dim("batch")}}
    with pytest.raises(ExportError, match="export without dynamic_shapes"):
        export_model(Outer(Tower()), (x,), opaque=[Tower], dynamic_shapes=dynamic)


@pytest.mark.filterwarnings("ignore")  # it compiles itself, with warnings of its own
def test_flex_attention_is_kept_whole() -> None:
    model = Outer(Flex()).requires_grad_(requires_grad=False)
    node = call_of(model, ["inner.0"])
    call = OpaqueCall.from_json(node.argument("call"))
    assert [shape for shape, _ in call.results] == [(2, 2, 4, 2)]


def test_hooks_of_an_opaque_module_run_once() -> None:
    model = Outer(Tower())
    model.inner[0].register_forward_hook(lambda *_: torch.zeros(4, 32))
    graph = load_graph(export_model(model, (torch.randn(4, 8),), opaque=[Tower]))
    assert not any("zeros" in node.operator for node in graph.nodes)
    assert graph.model is not None
    # It runs live, so nothing that it reads is recorded.
    assert not any(name.startswith("inner.0.") or "Tower:" in name for name in graph.model.state)


def test_costs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(OptionError, match="flops is nan: it should be a finite number"):
        OpaqueModule(Tower, flops=float("nan"))


def test_coverage_says_how_an_opaque_module_is_sharded() -> None:
    for along_batch, reasons in ((False, ["along_batch=True"]), (True, [])):
        entry = OpaqueModule(Rows, along_batch=along_batch)
        graph = load_graph(export_model(Outer(Rows()), (torch.randn(4, 8),), opaque=[entry]))
        (use,) = [u for u in operator_coverage(graph).operators if u.operator == OPAQUE_MODULE]
        assert len(use.reasons) == len(reasons)
        assert all(part in text for part, text in zip(reasons, use.reasons, strict=True))


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row if row.sum() > 0 else -row for row in x])


class Stack(nn.Module):
    """Two modules that branch on data, one that returns a number, and one that export traces."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Branch(), Branch()])
        self.scaled = Scaled()
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for branch in self.branches:
            x = branch(x)
        return self.last(self.scaled(x))


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        return float(x.detach().sum())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.total(x)


def test_untraceable_modules_are_kept_whole_and_named(caplog: pytest.LogCaptureFixture) -> None:
    graph = load_graph(export_model(Stack(), (torch.randn(4, 8),), opaque="auto"))
    whole = [node.module for node in graph.nodes if node.operator == OPAQUE_MODULE]
    assert whole == ["branches.0", "branches.1", "scaled"]
    assert any(node.module == "last" for node in graph.nodes)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert messages[0].startswith("kept whole: branches.0, branches.1; ")
    assert "depends on the data" in messages[0]
    assert messages[2].startswith("kept whole: scaled; the opaque module 'scaled.total' (Total)")


def test_a_model_that_cannot_be_traced_itself_is_refused() -> None:
    with pytest.raises(ExportError, match="depends on the data"):
        export_model(Branch(), (torch.randn(4),), opaque="auto")
    with pytest.raises(ExportError, match="give a list of modules"):
        export_model(Stack(), (torch.randn(4, 8),), opaque="branches.0")
