"""Numbers made of dynamic sizes: right at all sizes, or refused when the model is exported."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from support.evaluation import run_graph
from support.size_formulas import ARGUMENTS, FEATURES, NUMBERS, Formula, Hidden
from torch import nn
from torch.export import Dim

from autoshard.errors import ExportError, GraphError, SchemaError, UnsupportedError
from autoshard.graph import (
    ArchiveLimits,
    Graph,
    InputKind,
    export_model,
    graph_from_json,
    graph_to_json,
    load_graph,
    read_archive,
    resized,
)
from autoshard.graph.sizes import dynamic_shapes as dynamic_shapes_module

EXAMPLE = 8
BATCH = Dim("batch", min=4, max=64)
GROUPS = {"numbers": NUMBERS, "arguments": ARGUMENTS}


def rows(batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, FEATURES, dtype=torch.float64, generator=generator)


@cache
def hidden(group: str) -> nn.Module:
    torch.manual_seed(0)
    return Hidden(GROUPS[group]).double()


@cache
def exported(group: str) -> Graph:
    archive = export_model(hidden(group), (rows(EXAMPLE),), dynamic_shapes=({0: BATCH},))
    return load_graph(archive)


def at_size(graph: Graph, batch: int) -> Graph:
    assert graph.dynamic is not None, graph.fixed_sizes
    (symbol,) = graph.dynamic.symbols
    return resized(graph, {symbol.name: batch})


def run(graph: Graph, model: nn.Module, *values: torch.Tensor) -> list[Any]:
    names = [i.name for i in graph.inputs if i.kind is InputKind.USER]
    return run_graph(graph, model, dict(zip(names, values, strict=True)))


@pytest.mark.parametrize("batch", [EXAMPLE, 16, 5, 63, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_numbers_are_those_of_the_model_at_every_size(group: str, batch: int) -> None:
    """The example's size, larger and smaller ones, and the least."""
    model = hidden(group)
    same = deepcopy(model)
    found = run(at_size(exported(group), batch), same, rows(batch))
    for (name, expected), actual in zip(model(rows(batch)).items(), found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-300, msg=name)
        gradients = [
            torch.autograd.grad(result.square().sum(), one.weight, retain_graph=True)[0]
            for result, one in ((actual, same), (expected, model))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12, msg=name)


def test_documents_keep_formulas() -> None:
    for group in GROUPS:
        graph = exported(group)
        read = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
        assert read == graph
        assert at_size(read, 16) == at_size(graph, 16)
        assert at_size(at_size(graph, 16), EXAMPLE) == graph


class Applied(nn.Module):
    """A function of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def export_of(
    function: Callable[..., Any],
    *sizes: Any,
    examples: tuple[int, ...] = (EXAMPLE,),
    **options: Any,
) -> bytes:
    shapes = (tuple({0: size} for size in sizes),)
    inputs = tuple(map(rows, examples))
    return export_model(Applied(function), inputs, dynamic_shapes=shapes, **options)


REFUSED: dict[str, tuple[Formula, Formula]] = {
    "float": (
        lambda x: x.sum() * float(x.shape[0]),
        lambda x: x.sum() * torch.sym_float(x.shape[0]),
    ),
    "math.sqrt": (
        lambda x: x.sum() * math.sqrt(x.shape[0]),
        lambda x: x.sum() * x.shape[0] ** 0.5,
    ),
    "math.log": (
        lambda x: x.sum() * math.log(x.shape[0]),
        lambda x: x.sum() * torch.full((), x.shape[0], dtype=x.dtype).log(),
    ),
    "math.exp": (
        lambda x: x.sum() * math.exp(-x.shape[0]),
        lambda x: x.sum() * torch.full((), -x.shape[0], dtype=x.dtype).exp(),
    ),
    "int": (
        lambda x: x.sum() * int(x.shape[0] * 0.5),
        lambda x: x.sum() * (x.shape[0] // 2),
    ),
    "len": (lambda x: x.sum() / len(x), lambda x: x.sum() / x.shape[0]),
    "math.floor": (
        lambda x: x.sum() * math.floor(x.shape[0] / 3),
        lambda x: x.sum() * (x.shape[0] // 3),
    ),
    "math.ceil": (
        lambda x: x.sum() * math.ceil(x.shape[0] / 3),
        lambda x: x.sum() * -(-x.shape[0] // 3),
    ),
    "round": (
        lambda x: x.sum() * round(x.shape[0] / 3, 2),
        lambda x: x.sum() * torch.full((), x.shape[0] / 3, dtype=x.dtype).round(decimals=2),
    ),
    "abs": (
        lambda x: x.sum() * abs(x.shape[0] / 3 - 5),
        lambda x: x.sum() * torch.full((), x.shape[0] / 3 - 5, dtype=x.dtype).abs(),
    ),
    "a scale of attention": (
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None], x[None], x[None], scale=1 / x.shape[0]
        ),
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None] * (FEATURES**0.5 / x.shape[0]), x[None], x[None]
        ),
    ),
    "a probability": (
        lambda x: nn.functional.dropout(x, 1 / x.shape[0], training=False),
        lambda x: x * 1.0,
    ),
    "an epsilon": (
        lambda x: nn.functional.layer_norm(x, (FEATURES,), eps=1 / x.shape[0]),
        lambda x: (
            (x - x.mean(-1, keepdim=True))
            * (x.var(-1, unbiased=False, keepdim=True) + 1 / x.shape[0]).rsqrt()
        ),
    ),
    "a branch": (
        lambda x: x * 2 if x.shape[0] > 5 else x,
        lambda x: torch.where(torch.full((), x.shape[0]) > 5, x * 2, x),
    ),
    "a choice": (
        lambda x: x * (x.shape[0] + 1 if x.shape[0] > 5 else 6),
        lambda x: x * max(x.shape[0] + 1, 6),
    ),
}
"""What cannot be followed, by the function; and other code for the same number."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_an_error_that_says_where(name: str) -> None:
    function, instead = REFUSED[name]
    line = rf"{__file__}:\d+, `.*x\.shape\[0\]|File \"{__file__}\", line \d+.*x\.shape\[0\]"
    line = line if name not in ("len", "a scale of attention") else __file__
    with pytest.raises(ExportError, match=line) as caught:
        export_of(function, Dim("batch", max=64))
    advice = "torch.where" if name in ("a branch", "a choice") else "Export with static shapes; or "
    assert advice in str(caught.value)
    graph = load_graph(export_of(instead, BATCH))
    for batch in (EXAMPLE, 16, 5):
        (found,) = run(at_size(graph, batch), nn.Module(), rows(batch))
        torch.testing.assert_close(found, function(rows(batch)), rtol=1e-12, atol=0)


def test_a_static_export_takes_the_number_of_the_example() -> None:
    for function, _ in REFUSED.values():
        archive = export_model(Applied(function), (rows(EXAMPLE),))
        (found,) = run(load_graph(archive), nn.Module(), rows(EXAMPLE))
        torch.testing.assert_close(found, function(rows(EXAMPLE)), rtol=1e-12, atol=0)


def test_a_size_that_pytorch_may_fix_is_fixed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = load_graph(export_of(lambda x: x.sum() * float(x.shape[0]), Dim.AUTO))
    assert graph.dynamic is None
    assert "needs the plain value of s" in caplog.text
    assert __file__ in caplog.text
    graph = load_graph(export_of(lambda x: x.quantile(1 / x.shape[0]), Dim.AUTO))
    assert graph.dynamic is None
    assert graph.fixed_sizes == "the export allows no other sizes"


def branching(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    if x.shape[0] % 4 == 0:
        x = x * 2
    if others and x.shape[0] < others[0].shape[0]:
        x = x + others[0].sum()
    return x


@pytest.mark.parametrize("strict", [False, True])
def test_branches_are_those_of_the_example_or_refused(strict: bool) -> None:
    archive = export_of(branching, Dim.AUTO, Dim.AUTO, examples=(8, 12), strict=strict)
    graph = load_graph(archive)
    assert graph.dynamic is not None
    first, second = (symbol.name for symbol in graph.dynamic.symbols)
    if graph.dynamic.planned[first] == 12:
        first, second = second, first
    for sizes in ((16, 20), (4, 5)):
        made = resized(graph, dict(zip((first, second), sizes, strict=True)))
        inputs = tuple(map(rows, sizes))
        torch.testing.assert_close(run(made, nn.Module(), *inputs)[0], branching(*inputs))
    for sizes, condition in (
        ((6, 12), r"% 4 == 0"),
        ((12, 12), r"size\(\)\[0\] < .*size\(\)\[0\]"),
    ):
        with pytest.raises(GraphError, match=f"{condition}, which is not true of these"):
            resized(graph, dict(zip((first, second), sizes, strict=True)))


class Nested(nn.Module):
    def forward(
        self,
        x: torch.Tensor,
        more: dict[str, list[torch.Tensor]],
        *,
        Last: torch.Tensor,  # noqa: N803  the names of inputs are in lower case
    ) -> torch.Tensor:
        if x.shape[0] + more["a-b"][0].shape[0] > Last.shape[0]:
            return x.sum() + more["a-b"][0].sum() + Last.sum()
        return x.sum()


def test_conditions_on_nested_arguments() -> None:
    shapes = {"x": {0: Dim.AUTO}, "more": {"a-b": [{0: Dim.AUTO}]}, "Last": {0: Dim.AUTO}}
    archive = export_model(
        Nested(), (rows(8), {"a-b": [rows(5)]}), {"Last": rows(12)}, dynamic_shapes=shapes
    )
    graph = load_graph(archive)
    assert graph.dynamic is not None, graph.fixed_sizes
    by_size = {symbol.planned: symbol.name for symbol in graph.dynamic.symbols}
    assert resized(graph, {by_size[12]: 10}).values["last"].shape == (10, FEATURES)
    with pytest.raises(GraphError, match=r"more\['a-b'\]\[0\]\.size\(\)\[0\]"):
        resized(graph, {by_size[12]: 13})


def test_a_multiple_of_a_dynamic_size() -> None:
    pairs = Dim("pairs", max=32)
    graph = load_graph(export_of(lambda x: x.reshape(-1, 2, FEATURES) / x.shape[0], 2 * pairs))
    assert graph.dynamic is not None, graph.fixed_sizes
    assert graph.dynamic.planned == {symbol.name: 4 for symbol in graph.dynamic.symbols}
    (name,) = (i.name for i in graph.inputs)
    (size,) = graph.dynamic.sizes_of(name).values()
    assert (size.factor, size.offset) == (2, 0)
    (found,) = run(at_size(graph, 6), nn.Module(), rows(12))
    torch.testing.assert_close(found, rows(12).reshape(-1, 2, FEATURES) / 12)


def test_numbers_among_the_results() -> None:
    graph = load_graph(export_of(lambda x: (x.sum(), x.shape[0] / 3, x.shape[0]), BATCH))
    for batch in (EXAMPLE, 16):
        _, third, size = run(at_size(graph, batch), nn.Module(), rows(batch))
        assert (third, size) == (batch / 3, batch)
        assert (type(third), type(size)) == (float, int)


def model_json(archive: bytes) -> dict[str, Any]:
    return dict(read_archive(archive, limits=ArchiveLimits()).model)


def loaded(model: dict[str, Any]) -> Graph:
    return load_graph(json.dumps(model).encode())


def test_functions_that_are_not_known_are_an_error_with_the_line() -> None:
    """As of a later version of PyTorch."""
    text = json.dumps(model_json(export_of(lambda x: x * (x.shape[0] / 3), BATCH)))
    later = text.replace("IntTrueDiv", "NewDivision")
    with pytest.raises(UnsupportedError, match=rf"aten\.mul.*{__file__}.*'NewDivision' of sizes"):
        load_graph(later.encode())


def test_what_is_not_known_of_sizes_fixes_them() -> None:
    """The program is planned for the example, and other sizes run unsharded."""
    archive = export_of(lambda x: x.reshape(-1, 2, FEATURES), Dim.AUTO)
    assert loaded(model_json(archive)).dynamic is not None
    text = json.dumps(model_json(archive)).replace("FloorDiv", "NewDivision")
    fixed = load_graph(text.encode())
    assert fixed.dynamic is None
    assert "'NewDivision' of sizes is not supported" in fixed.fixed_sizes
    assert graph_from_json(graph_to_json(fixed)) == fixed
    for guard in ("L['x'].other() > 3", "L['other'].size()[0] > 3", "L['args'][0].size()[9] > 3"):
        fixed = loaded(model_json(archive) | {"guards_code": [guard]})
        assert fixed.fixed_sizes, guard
    for guard in ("L['args'][0].stride()[0] == 6", "6 == 6"):
        assert loaded(model_json(archive) | {"guards_code": [guard]}).dynamic is not None


def test_too_many_ways_to_follow_fix_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_shapes_module, "MAX_CALLS", 3)
    graph = load_graph(export_of(lambda x: x / x.shape[0], BATCH))
    assert graph.dynamic is None
    assert "too many ways" in graph.fixed_sizes


def altered(*path: Any, to: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(graph_to_json(exported("numbers"))))
    part: Any = document["dynamic"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("formulas", 0, "expression"), "IntTrueDiv(SIZE, Integer(9))", "is not"),
        (("formulas", 0, "expression"), "__import__('os').system('true')", "is not supported"),
        (("formulas", 0, "expression"), "Symbol('other')", "is not supported"),
        (("formulas", 0, "expression"), "SIZE / 0", "has no value"),
        (("formulas", 0, "expression"), "SIZE ** 40000.5", "has no value"),
        (("formulas", 0, "expression"), "SIZE ** 40000", "64 bits"),
        (("formulas", 0, "expression"), "SIZE @ 2", "has no value"),
        (("formulas", 0, "expression"), "round(SIZE, -999999999)", "at most 63 digits"),
        (("formulas", 0, "expression"), "SIZE << 999999999", "64 bits"),
        (("formulas", 0, "expression"), "-" * 3000 + "SIZE", "has no value|is not a size"),
        (("formulas", 0, "expression"), "x" * 5000, "too long"),
        (("formulas", 0, "expression"), 1, "valid string"),
        (("formulas", 0, "name"), "BATCH", "is used 2 times"),
        (("formulas", 0, "name"), "other", "unknown symbol"),
        (("conditions",), [{"expression": "SIZE > 9", "text": "x > 9"}], "x > 9 is"),
        (("conditions",), [{"expression": "f(2)", "text": "x"}], "is not supported"),
    ],
)
def test_documents_with_other_formulas_are_refused(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    dynamic = exported("numbers").dynamic
    assert dynamic is not None
    (symbol,) = dynamic.symbols
    text = json.dumps(altered(*path, to=value)).replace("SIZE", f"Symbol('{symbol.name}')")
    with pytest.raises((SchemaError, UnsupportedError), match=message):
        graph_from_json(json.loads(text.replace("BATCH", symbol.name)))


def test_documents_without_formulas_stay_as_they_were() -> None:
    graph = load_graph(export_of(lambda x: x * x.shape[0], BATCH))
    assert graph_to_json(graph)["dynamic"].keys() == {"symbols", "sizes"}
