"""Writes the nodes of calls that were left out into the JSON of an exported program."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

from autoshard.graph.export.repetition.calls import TracedCall

NAME = "autoshard_repeated_call"
"""Beginning of the names of nodes that stand for calls."""

_TARGET = "torch.ops.autoshard.repeated_call.default"
_RESULT = re.compile(rf'"{NAME}_(\d+)_(\d+)"')
_CHECK = "torch.ops.aten._assert_tensor_metadata.default"
"""The operator that the export adds before casts, and numbers in order."""
_CHECK_NAME = "_assert_tensor_metadata_default"
_NUMBERED = re.compile(r"\\u0000c0\\u0000")
_MARK = re.compile(r"\\u0000(\w)(\d+)\\u0000")
_CHECK_MARK = "\0c0\0"
_ROOT = "L__self__"


class RepetitionError(Exception):
    """The model has to be traced without leaving calls out."""


@dataclass(frozen=True)
class Template:
    """A traced call that others repeat.

    Attributes:
        number: its number.
        traced: what it has added.
    """

    number: int
    traced: TracedCall

    def needed(self, found: set[str]) -> set[str]:
        """Names of nodes that a program must have.

        Detached tensors without a reader are left out, and parts of results get other names.

        Args:
            found: names that it has.
        """
        traced = self.traced
        return {
            name
            for i, (name, base) in enumerate(zip(traced.names, traced.bases, strict=True))
            if i not in traced.items and (base != "detach" or name in found)
        }


@dataclass(frozen=True)
class Repeated:
    """A call that was left out.

    Attributes:
        template: the call that it repeats.
        path: dotted name of the module.
        names: names of its nodes; empty for those that take a part of a result.
        counts: how often each function of torch had been called before.
    """

    template: Template
    path: str
    names: tuple[str, ...]
    counts: Mapping[Any, int]


def lengthen(model: bytes, repeated: Sequence[Repeated]) -> bytes:
    """The JSON of a program with the nodes of all calls.

    Args:
        model: that of a program with one node for each call.
        repeated: the calls, by their numbers.

    Raises:
        RepetitionError: the program has an argument that cannot be renamed.
    """
    document = json.loads(model)
    graph = document["graph_module"]["graph"]
    _mark_checks(graph["nodes"])
    calls = _Calls(graph, repeated)
    nodes, values = ", ".join(calls.nodes()), ", ".join(calls.values())
    graph |= {"nodes": ["\0n0\0"], "tensor_values": {"\0v0\0": ""}}
    whole = calls.resolved(json.dumps(document))
    whole = whole.replace('"\\u0000v0\\u0000": ""', values, 1)
    whole = whole.replace('"\\u0000n0\\u0000"', nodes, 1)
    numbers = count()
    return _NUMBERED.sub(lambda _: _check_name(next(numbers)), whole).encode()


class _Calls:
    """The nodes of a program, with those of calls in place of the calls.

    Args:
        graph: the JSON of the graph.
        repeated: the calls that were left out.
    """

    def __init__(self, graph: Any, repeated: Sequence[Repeated]) -> None:
        self._graph = graph
        self._given = {
            _number(node): [x["name"] for x in node["inputs"][0]["arg"]["as_tensors"]]
            for node in graph["nodes"]
            if node["target"] == _TARGET
        }
        outputs = {
            _number(node): list(_names(node["outputs"]))
            for node in graph["nodes"]
            if node["target"] == _TARGET
        }
        self._repeated = [_named(one, outputs[i]) for i, one in enumerate(repeated)]
        self._results = set().union(*outputs.values())
        templates = {one.template.number: one.template for one in repeated}
        self._bodies = {
            number: _TemplateBody(graph, template, self._given[-1 - number])
            for number, template in templates.items()
        }
        for body in self._bodies.values():
            body.check(graph)

    def resolved(self, text: str) -> str:
        """A JSON text with the names of nodes in place of those of results of calls."""
        return _RESULT.sub(lambda found: f'"{self._result(found)}"', text)

    def _result(self, found: re.Match[str]) -> str:
        one = self._repeated[int(found[1])]
        return one.names[one.template.traced.results.made[int(found[2])]]

    def _resolved_name(self, name: str) -> str:
        found = _RESULT.fullmatch(f'"{name}"')
        return name if found is None else self._result(found)

    def nodes(self) -> Iterator[str]:
        """The nodes."""
        for node in self._graph["nodes"]:
            if node["target"] != _TARGET:
                yield self.resolved(json.dumps(node))
            elif (number := _number(node)) >= 0:
                one = self._repeated[number]
                given = list(map(self._resolved_name, self._given[number]))
                yield self._bodies[one.template.number].nodes(one, given)

    def values(self) -> Iterator[str]:
        """Names and shapes of their values."""
        for name, value in self._graph["tensor_values"].items():
            found = _RESULT.fullmatch(f'"{name}"')
            if name not in self._results:
                yield f"{json.dumps(name)}: {json.dumps(value)}"
            elif found is not None and found[2] == "0":
                one = self._repeated[int(found[1])]
                yield self._bodies[one.template.number].values(one)


def _named(one: Repeated, outputs: Sequence[str]) -> Repeated:
    """A call with the names of parts of results, which follow its results."""
    traced, names = one.template.traced, list(one.names)
    further = outputs[len(traced.results.made) :]
    for place, name in zip(traced.items, further, strict=True):
        names[place] = name
    return replace(one, names=tuple(names))


def _references(value: Any) -> Iterator[str]:
    """The names of values in arguments."""
    if isinstance(value, dict):
        if value.keys() == {"name"}:
            yield value["name"]
        for key, inner in value.items():
            if key != "name":
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _number(node: Any) -> int:
    number: int = node["inputs"][1]["arg"]["as_int"]
    return number


def is_check(name: str) -> bool:
    """True for names of checks that the export adds."""
    return name.startswith(_CHECK_NAME)


def _check_name(number: int) -> str:
    return f"{_CHECK_NAME}_{number}" if number else _CHECK_NAME


def _checks(nodes: Sequence[Any]) -> Iterator[Any]:
    """The checks that the export has added, also those in regions of nodes."""
    for node in nodes:
        if node["target"] == _CHECK and is_check(node["name"]):
            yield node
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from _checks(argument["arg"]["as_graph"]["graph"]["nodes"])


def _mark_checks(nodes: Sequence[Any]) -> None:
    """Mark the names of the checks that the export has added, to be numbered again.

    Raises:
        RepetitionError: they are not numbered in order.
    """
    for number, node in enumerate(_checks(nodes)):
        if node["name"] != _check_name(number) or node["outputs"]:
            raise RepetitionError("checks are not numbered in order")
        node["name"] = _CHECK_MARK


class _TemplateBody:
    """The JSON of the nodes of a template, in pieces between names.

    Args:
        graph: the JSON of the graph.
        template: the template.
        given: names of the tensors that it is given.
    """

    def __init__(self, graph: Any, template: Template, given: Sequence[str]) -> None:
        traced = template.traced
        self._template = template
        self._path = ".".join(map(str, traced.call.path))
        self._marks = {name: f"\0g{i}\0" for i, name in reversed(list(enumerate(given)))}
        self._names = _final_names(graph, traced)
        self._marks |= {name: f"\0n{i}\0" for i, name in enumerate(self._names)}
        items = traced.items
        place = {name: i for i, name in enumerate(traced.names) if i not in items}
        pairs = pairwise((*graph["nodes"], {"name": ""}))
        nodes = [
            node
            for node, following in pairs
            if node["name"] in place or (node["name"] == _CHECK_MARK and following["name"] in place)
        ]
        self._inside = {node["name"] for node in nodes}
        texts = [json.dumps(self._marked(node, place.get(node["name"]))) for node in nodes]
        self._nodes = _MARK.split(", ".join(texts))
        made = {x for node in nodes for x in _names(node["outputs"])}
        self._values = _MARK.split(
            ", ".join(
                f"{json.dumps(self._mark(name))}: {json.dumps(value)}"
                for name, value in graph["tensor_values"].items()
                if name in made
            )
        )

    def check(self, graph: Any) -> None:
        """Check that other nodes read nothing but results of the call.

        Raises:
            RepetitionError: one reads something else.
        """
        made = set(self._names)
        inner = made - {self._names[i] for i in self._template.traced.results.made}
        for node in graph["nodes"]:
            is_inside = node["name"] in self._inside or node["name"] == _CHECK_MARK
            if not is_inside and not inner.isdisjoint(_references(node["inputs"])):
                raise RepetitionError(f"{node['name']} reads what a layer does not return")
        if not inner.isdisjoint(_references(graph["outputs"])):
            raise RepetitionError("the model returns what a layer does not")

    def _mark(self, name: str) -> str:
        if name in self._marks:
            return self._marks[name]
        of, _, number = name.rpartition("_unused_")
        if of not in self._marks:
            raise RepetitionError(f"{name} is not known in a repeated layer")
        return f"{self._marks[of]}_unused_{number}"

    def _marked(self, node: Any, place: int | None) -> Any:
        metadata = dict(node["metadata"])
        if "nn_module_stack" in metadata:
            entries = metadata["nn_module_stack"].split(";")
            metadata["nn_module_stack"] = ";".join(map(self._marked_module, entries))
        if (
            place is not None
            and "torch_fn" in metadata
            and self._template.traced.functions[place] is not None
        ):
            name, _, rest = metadata["torch_fn"].partition(";")
            metadata["torch_fn"] = f"{name.rpartition('_')[0]}_\0f{place}\0;{rest}"
        return {
            **node,
            "name": node["name"] if place is None else self._mark(node["name"]),
            "inputs": [{**x, "arg": self._marked_argument(x["arg"])} for x in node["inputs"]],
            "outputs": list(map(self._marked_argument, node["outputs"])),
            "metadata": metadata,
        }

    def _marked_module(self, entry: str) -> str:
        key, path, kind = entry.split(",", 2)
        if path != self._path and not path.startswith(f"{self._path}."):
            return entry
        rest = path[len(self._path) :]
        if not key.startswith(_ROOT + path):
            raise RepetitionError(f"the module {entry!r} is not known in a repeated layer")
        suffix = key[len(_ROOT + path) :]
        return f"{_ROOT}\0p0\0{rest}{suffix},\0p0\0{rest},{kind}"

    def _marked_argument(self, argument: Any) -> Any:
        (kind, value), *_ = argument.items()
        if kind in _WITHOUT_NAMES:
            return argument
        return {kind: _renamed(kind, value, self._mark)}

    def nodes(self, one: Repeated, given: Sequence[str]) -> str:
        """The nodes of a call that was left out."""
        return self._joined(self._nodes, one, given)

    def values(self, one: Repeated) -> str:
        """The shapes of their values."""
        return self._joined(self._values, one, ())

    def _joined(self, pieces: Sequence[str], one: Repeated, given: Sequence[str]) -> str:
        functions = self._template.traced.functions
        path = json.dumps(one.path)[1:-1]
        resolve: Mapping[str, Callable[[int], str]] = {
            "n": lambda i: one.names[i],
            "g": lambda i: given[i],
            "p": lambda _: path,
            "c": lambda _: "\\u0000c0\\u0000",
            "f": lambda i: str(one.counts[functions[i][0]] + functions[i][1]),
        }
        marks = zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True)
        return pieces[0] + "".join(
            f"{resolve[kind](int(number))}{text}" for kind, number, text in marks
        )


def _final_names(graph: Any, traced: TracedCall) -> list[str]:
    """The names in the program of the nodes of a traced call.

    Raises:
        RepetitionError: an operator returns something else than tensors or one list of them.
    """
    outputs = {node["name"]: node["outputs"] for node in graph["nodes"]}
    names = list(traced.names)
    for place, (whole, number) in traced.items.items():
        made = outputs[names[whole]]
        kinds = {kind for output in made for kind in output}
        if kinds != {"as_tensor"} and (kinds != {"as_tensors"} or len(made) > 1):
            raise RepetitionError(f"{names[whole]} returns {', '.join(sorted(kinds))}")
        names[place] = list(_names(made))[number]
    return names


_WITHOUT_NAMES = frozenset(
    f"as_{kind}"
    for kind in (
        *("none", "int", "ints", "float", "floats", "bool", "bools", "string", "strings"),
        *("complex", "scalar_type", "memory_format", "layout", "device"),
        *("int_lists", "float_lists", "operator"),
    )
)


def _renamed(kind: str, value: Any, rename: Callable[[str], str]) -> Any:
    match kind:
        case "as_tensor":
            return {**value, "name": rename(value["name"])}
        case "as_tensors":
            return [_renamed("as_tensor", x, rename) for x in value]
        case "as_optional_tensors":
            return [
                {of: _renamed(of, x, rename) if of == "as_tensor" else x}
                for item in value
                for of, x in item.items()
            ]
        case "as_nested_tensors":
            return [_renamed("as_tensors", x, rename) for x in value]
    raise RepetitionError(f"an argument is {kind}")


def _names(arguments: Any) -> Iterator[str]:
    found: list[str] = []

    def keep(name: str) -> str:
        found.append(name)
        return name

    for argument in arguments:
        for kind, value in argument.items():
            if kind not in _WITHOUT_NAMES:
                _renamed(kind, value, keep)
    yield from found
