"""Tree specs of a plan, which may come from an untrusted source."""

import json
import sys
from collections import defaultdict
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from autoshard.errors import PlanError
from autoshard.runtime.checks.call_structure import read_spec


@pytest.mark.parametrize("value", [(1, 2), {"a": [1, {"b": 2}]}, ((1,), {"x": None})])
def test_specs_come_back(value: Any) -> None:
    spec = pytree.tree_structure(value)
    assert read_spec(pytree.treespec_dumps(spec)) == spec


def spec_of(kind: str, context: Any) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


def test_nothing_is_imported() -> None:
    """PyTorch's own reader imports the modules that these two specs name."""
    factory = {
        "default_factory_module": "this",
        "default_factory_name": "d",
        "dict_context": ["a"],
    }
    enum = json.dumps([{"__enum__": True, "fqn": "this:d", "name": "a"}])
    for text in (spec_of("collections.defaultdict", factory), spec_of("builtins.dict", enum)):
        with pytest.raises(PlanError, match="which a plan cannot read safely"):
            read_spec(text)
    assert "this" not in sys.modules
    with pytest.raises(PlanError, match="plain dicts"):
        read_spec(pytree.treespec_dumps(pytree.tree_structure(defaultdict(list, a=1))))


def test_unknown_types_and_broken_text() -> None:
    with pytest.raises(PlanError, match="import the module that defines this type"):
        read_spec(spec_of("somewhere.Output", "null"))
    for text in ("", "{}", "[1]", "[1, 2]", '[9, {"type": null}]', "[1, {}]"):
        with pytest.raises(PlanError, match="cannot be read"):
            read_spec(text)
