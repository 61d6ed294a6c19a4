"""Dynamic sizes of an export."""

import json
from typing import Any

import pytest
import sympy
import torch
from support import models
from torch import nn
from torch.export import Dim
from torch.utils._sympy import functions

from autoshard.errors import GraphError, SchemaError, UnsupportedError
from autoshard.graph import (
    Graph,
    export_model,
    graph_from_json,
    graph_to_json,
    load_graph,
    resized,
)
from autoshard.graph.sizes.expressions import evaluate

OPEN = {0: Dim("batch", max=64), 1: Dim("sequence", max=64)}


def llama(batch: int, sequence: int, *, is_open: bool) -> Graph:
    torch.manual_seed(0)
    model, inputs = models.llama(layers=1, batch=batch, sequence=sequence)
    shapes = {name: OPEN if isinstance(x, torch.Tensor) else None for name, x in inputs.items()}
    return load_graph(export_model(model, (), inputs, dynamic_shapes=shapes if is_open else None))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return llama(4, 8, is_open=True)


def names_of(graph: Graph) -> dict[int, str]:
    """The open sizes by their number in the example."""
    assert graph.dynamic is not None
    return {symbol.planned: symbol.name for symbol in graph.dynamic.symbols}


@pytest.mark.matrix
@pytest.mark.parametrize(("batch", "sequence"), [(6, 8), (4, 12), (10, 16), (2, 5)])
def test_a_resized_program_is_the_one_exported_at_that_size(
    graph: Graph, batch: int, sequence: int
) -> None:
    """Shapes and arguments of all operators, merged dims among them."""
    names = names_of(graph)
    made = resized(graph, {names[4]: batch, names[8]: sequence})
    expected = llama(batch, sequence, is_open=False)
    assert [node.operator for node in made.nodes] == [node.operator for node in expected.nodes]
    for one, other in zip(made.nodes, expected.nodes, strict=True):
        assert made.kind(one) == expected.kind(other), one.name


def test_sizes_that_are_open_one_by_one() -> None:
    """Without names labels may be of another size than ids, as far as the export knows."""
    model, inputs = models.llama(layers=1)
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = {name: auto if isinstance(x, torch.Tensor) else None for name, x in inputs.items()}
    graph = load_graph(export_model(model, (), inputs, dynamic_shapes=shapes))
    assert graph.dynamic is not None
    assert len(graph.dynamic.symbols) == 4
    double = resized(graph, {name: 2 * n for name, n in graph.dynamic.planned.items()})
    assert double.values["input_ids"].shape == double.values["labels"].shape == (8, 16)


def test_sizes_that_agree_by_chance_stay_apart() -> None:
    graph = llama(8, 8, is_open=True)
    assert graph.dynamic is not None
    batch, sequence = (symbol.name for symbol in graph.dynamic.symbols)
    assert resized(graph, {batch: 4}).values["input_ids"].shape == (4, 8)
    assert resized(graph, {sequence: 4}).values["input_ids"].shape == (8, 4)


def test_an_export_of_fixed_sizes_has_none_open() -> None:
    assert llama(4, 8, is_open=False).dynamic is None


def test_the_document_keeps_them(graph: Graph) -> None:
    read = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert read == graph
    assert read.dynamic == graph.dynamic
    again = resized(resized(graph, {names_of(graph)[4]: 6}), {names_of(graph)[4]: 4})
    assert again == graph


def test_unknown_and_impossible_sizes_are_refused(graph: Graph) -> None:
    with pytest.raises(GraphError, match="there is no dynamic size 'batch'; the dynamic sizes are"):
        resized(graph, {"batch": 4})
    with pytest.raises(GraphError, match="not 1000000; export again with a wider"):
        resized(graph, {names_of(graph)[8]: 1_000_000})


class Squared(nn.Module):
    """Has a size that is no sum of products of different sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + x.new_ones(x.shape[0] ** 2)


def test_sizes_by_other_functions_than_sums_and_products() -> None:
    archive = export_model(Squared(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("n", max=64)},))
    graph = load_graph(archive)
    assert graph.dynamic is not None
    (symbol,) = graph.dynamic.symbols
    shapes = [tensor.shape for tensor in resized(graph, {symbol.name: 6}).values.values()]
    assert (36,) in shapes


def test_a_narrow_range() -> None:
    shapes = ({0: Dim("n", min=3, max=4)},)
    archive = export_model(nn.ReLU(), (torch.ones(4, 3),), dynamic_shapes=shapes)
    dynamic = load_graph(archive).dynamic
    assert dynamic is not None
    assert not dynamic.supports({dynamic.symbols[0].name: 5})


def altered(graph: Graph, *path: Any, to: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(graph_to_json(graph)))
    part: Any = document["dynamic"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("symbols", 0, "planned"), 5, "is not 5"),
        (("symbols", 0, "planned"), "4", "planned: Input should be a valid integer"),
        (("symbols", 0, "planned"), 2**63, "limited to 63 bits"),
        (("symbols", 0, "planned"), 10**4000, "at most 64 bits"),
        (("sizes", 0, 0, 0, 0), 10**4000, "at most 64 bits"),
        (("symbols", 0, "name"), "other", "unknown symbol"),
        (("sizes", 0, 0, 0, 0), 3, "is not"),
        (("sizes", 0, 0, 0), [1], r"sizes\.0\.0\.0\.1: Field required"),
        (("sizes", 0, 0, 0), [1, ["n"] * 3], "at most 2 symbols"),
        (("sizes", 0, 1, 0), [], "is not"),
        (("sizes", 0, 1, 0), ["nodes", 10**6], "is not"),
        (("more",), 1, "more: Unexpected keyword argument"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    graph: Graph, path: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        graph_from_json(altered(graph, *path, to=value))


def test_expressions_have_sympys_values() -> None:
    a, b = sympy.symbols("a b", positive=True, integer=True)
    expressions = [
        2 * a + 3,
        a * b - 7,
        a**3,
        functions.FloorDiv(a, b),
        functions.PythonMod(a * 3, b),
        functions.Mod(a, b),
        functions.CleanDiv(a * b, b),
        functions.ModularIndexing(a, 2, 3),
        functions.PowByNatural(sympy.Integer(2), b),
        functions.LShift(a, b),
        functions.RShift(a, sympy.Integer(1)),
        functions.BitwiseFn_bitwise_and(a, b),
        functions.TruncToInt(functions.IntTrueDiv(a, b)),
        functions.FloorToInt(functions.IntTrueDiv(-a, b)),
        functions.CeilToInt(functions.IntTrueDiv(a, b)),
        functions.RoundToInt(functions.IntTrueDiv(a, b)),
        sympy.Abs(a - 20),
        functions.Max(a, b, sympy.Integer(9)),
        functions.Min(a, sympy.Integer(5)),
        sympy.Max(a, b, 9),
        sympy.Min(a, 5),
        sympy.Piecewise((a, a > b), (b, True)),
        functions.Where(a > b, a, b),
        -a,
    ]
    sizes = {"a": 11, "b": 4}
    for expression in expressions:
        expected = int(expression.subs({a: 11, b: 4}))
        assert evaluate(sympy.srepr(expression), sizes) == expected
    real = [
        functions.ToFloat(a),
        functions.IntTrueDiv(a, b),
        functions.FloatTrueDiv(sympy.Float(1.5), functions.ToFloat(b)),
        functions.FloatPow(functions.ToFloat(a), sympy.Float(0.3)),
        functions.RoundDecimal(functions.IntTrueDiv(a, sympy.Integer(3)), sympy.Integer(2)),
        functions.OpaqueUnaryFn_sqrt(functions.ToFloat(a)),
        functions.OpaqueUnaryFn_log2(functions.ToFloat(a)),
        functions.ToFloat(a) * sympy.Float(0.1) - sympy.Float(7.25),
        functions.Max(functions.IntTrueDiv(a, b), sympy.Float(0.1)),
    ]
    for expression in real:
        found = evaluate(sympy.srepr(expression), sizes)
        assert type(found) is float
        assert found == pytest.approx(float(expression.subs({a: 11, b: 4})), rel=1e-15)
    flags = [a > b, a < b, sympy.Eq(a, 11), sympy.Ne(a, b), a >= 12, a <= 11]
    flags += [sympy.And(a > b, b > 4), sympy.Or(a > b, b > 4), sympy.Not(sympy.Eq(a, b))]
    for expression in [*flags, sympy.true, sympy.false]:
        assert evaluate(sympy.srepr(expression), sizes) is bool(expression.subs({a: 11, b: 4}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(A % 2 == 1) and not A == 3", True),
        ("A // 4 * 3 - -A", 17),
        ("1 < A <= 11 < 12", True),
        ("1 < A <= 10", False),
        ("max(5, A) == A or 1 / 0 > 1", True),
        ("torch.sym_float(A) ** 0.5 < 100.0", True),
        ("torch._sym_sqrt(A) > math.floor(3.5)", True),
        ("torch.sym_max(1, torch.sym_min(A, 7)) + torch.sym_int(A / 2)", 12),
        ("A if A > 20 else 2 * A", 22),
        ("A & 3 | A << 2 ^ A >> 1", 43),
    ],
)
def test_conditions_have_pythons_values(text: str, value: object) -> None:
    found = evaluate(text.replace("A", "Symbol('a')"), {"a": 11})
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("__import__('os').system('true')", UnsupportedError),
        ("Symbol('c')", UnsupportedError),
        ("Rational(1, 2)", UnsupportedError),
        ("Pow(Integer(9), Integer(999999999))", UnsupportedError),
        ("Integer('1')", UnsupportedError),
        ("Pow(" * 30 + "Integer(9)" + ", Integer(8))" * 30, UnsupportedError),
        ("Integer(" + " " * 5000 + "1)", UnsupportedError),
        ("Mul(", SchemaError),
        ("FloorDiv(Integer(1), Integer(0))", SchemaError),
        ("FloorDiv(Integer(1))", SchemaError),
        ("Add(" * 700 + "Integer(1)" + ")" * 700, SchemaError),
    ],
)
def test_what_is_no_size_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        evaluate(text, {"a": 1})
