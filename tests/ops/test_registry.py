"""The specs: their operators exist, and no field is missing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers an operator
from ops.calls import MakeExample

from autoshard.errors import SchemaError
from autoshard.graph import DType, Graph, Node, Ref, Tensor
from autoshard.ops import Call, call_of, has_rule, is_view, registry, rule_for, spec_for


def named(name: str) -> Any:
    """The packet or overload of that name."""
    namespace, packet, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet)
    return getattr(found, overload[0]) if overload else found


def test_every_operator_of_a_spec_exists() -> None:
    for name in registry.SPECS:
        assert named(name), name


def test_no_operator_has_two_specs() -> None:
    names = [name for family in registry.FAMILIES for s in family.SPECS for name in s.names]
    assert sorted(names) == sorted(registry.SPECS)


def aten_overloads() -> Iterator[tuple[str, Any]]:
    """Every functional operator of ATen."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            found = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if found is not None and not found._schema.is_mutable:
                yield f"aten.{packet}.{overload or 'default'}", found


def test_every_random_operator_is_seeded() -> None:
    drawing = [
        name for name, op in aten_overloads() if torch.Tag.nondeterministic_seeded in op.tags
    ]
    assert len(drawing) > 50
    for name in drawing:
        assert has_rule(name), name
        assert spec_for(name).draws is not None, name


def test_named_arguments_of_kernels_are_in_the_schema() -> None:
    for name, spec in registry.SPECS.items():
        found = named(name)
        overloads = (
            [getattr(found, o) for o in found.overloads()] if name.count(".") == 1 else [found]
        )
        for overload in overloads:
            arguments = {argument.name for argument in overload._schema.arguments}
            assert {spec.kernel_argument, spec.draws or ""} - {""} <= arguments, name


def test_views_cost_nothing() -> None:
    assert is_view("aten.transpose.int")
    assert is_view("aten.detach.default")
    assert not is_view("aten.cat.default")


def test_call_of_a_node() -> None:
    x, w = Tensor((4, 8), DType.FLOAT32), Tensor((2, 8), DType.FLOAT32)
    y = Tensor((4, 2), DType.FLOAT32)
    node = Node(
        "linear", "aten.linear.default", (("input", Ref("x")), ("weight", Ref("w"))), ("y",)
    )
    graph = Graph((), (node,), (), {"x": x, "w": w, "y": y})
    call = call_of(graph, node)
    nameless = (("input", Ref("")), ("weight", Ref("")))
    assert call == Call(node.operator, nameless, (x, w), (y,))
    assert call.positions("weight") == (1,)
    assert call.tensor("bias") is None
    assert rule_for(call).flops_per_point == 2.0


def test_attention_flops_are_those_of_two_products(example: MakeExample) -> None:
    q, k, v = torch.ones(2, 4, 8, 6), torch.ones(2, 4, 10, 6), torch.ones(2, 4, 10, 3)
    call = example("aten.scaled_dot_product_attention.default", query=q, key=k, value=v).call
    assert flops(call) == pytest.approx(2 * 2 * 4 * 8 * 10 * (6 + 3))


def test_convolution_flops_count_places_once(example: MakeExample) -> None:
    x = torch.ones(2, 4, 8, 8)
    plain = example("aten.conv2d.default", input=x, weight=torch.ones(6, 4, 3, 3)).call
    assert flops(plain) == pytest.approx(2 * 2 * 6 * 4 * 9 * 36)
    grouped = example("aten.conv2d.default", input=x, weight=torch.ones(6, 2, 3, 3), groups=2).call
    assert flops(grouped) == pytest.approx(2 * 2 * 6 * 2 * 9 * 36)


def flops(call: Call) -> float:
    rule = rule_for(call)
    total = rule.flops_per_point
    for size in rule.sizes.values():
        total *= size
    return total


@pytest.mark.parametrize(
    ("operator", "arguments", "shapes"),
    [
        ("aten.linear.default", ("input", "weight"), [(4, 8), (2, 9)]),
        ("aten.mm.default", ("self", "mat2"), [(4, 8), (8, 2, 2)]),
        ("aten.embedding.default", ("weight", "indices"), [(4,), (2,)]),
        ("aten.mul.Tensor", ("self", "other"), [(2, 2, 2), (4,)]),
        ("aten.linear.default", ("input", "weights"), [(4, 8), (2, 8)]),
    ],
)
def test_contradicting_shapes_name_the_operator(operator: str, arguments: Any, shapes: Any) -> None:
    tensors = tuple(Tensor(shape, DType.FLOAT32) for shape in shapes)
    given = tuple((name, Ref(name)) for name in arguments)
    with pytest.raises(SchemaError, match=operator):
        rule_for(Call(operator, given, tensors, (Tensor((4, 2), DType.FLOAT32),)))


def test_symbolic_dim_is_refused() -> None:
    call = Call(
        "aten.softmax.int",
        (("self", Ref("x")), ("dim", Ref("d"))),
        (Tensor((4, 8), DType.FLOAT32), Tensor((), DType.INT64)),
        (Tensor((4, 8), DType.FLOAT32),),
    )
    with pytest.raises(SchemaError, match="dim"):
        rule_for(call)
