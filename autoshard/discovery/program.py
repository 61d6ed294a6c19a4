"""Discovery of rules for all operators of a program that have none."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod

import torch

from autoshard.base.arguments import Wait, check_arguments
from autoshard.discovery.probe import NotTriableError, RandomOperatorError, probe_of
from autoshard.discovery.search import OutOfTimeError, RuleSearch
from autoshard.discovery.shapes import floats_in, integers_in
from autoshard.errors import GraphError, SchemaError, UnsupportedError
from autoshard.graph import (
    MAX_RULES,
    RULES_VERSION,
    CallRule,
    Graph,
    Node,
    rules_from_json,
    rules_to_json,
)
from autoshard.graph.ir import anonymous, call_key
from autoshard.ops import Call, call_of, has_rule, with_rules
from autoshard.solve import KeyValueStore

TIME_LIMIT = 30.0
"""Default time limit in seconds for all operators of a program."""

_LARGEST_SIZE = 1 << 20
"""Maximum integer attribute of ATen operators that are tried. Of a list the product counts, since
it may be the shape of an output."""

_NO_TIME = "the time limit was reached before it could be tried"

_TIME_PER_CALL = 10.0
"""Time limit in seconds for one kind of call, so that others get time too."""


@dataclass(frozen=True)
class Finding:
    """Result for one kind of call.

    Attributes:
        operator: operator of the calls.
        nodes: names of the nodes.
        rule: the rule that was found; None if the operator could not be tried.
        reason: the reason why it could not be tried.
    """

    operator: str
    nodes: tuple[str, ...]
    rule: CallRule | None
    reason: str = ""


@dataclass(frozen=True)
class Discovery:
    """Result of trying all operators of a program.

    Attributes:
        graph: the program with the rules that were found.
        findings: one result per kind of call that had no rule, in program order.
    """

    graph: Graph
    findings: tuple[Finding, ...]

    @property
    def is_complete(self) -> bool:
        """True if everything was tried within the time limit."""
        return all(finding.reason != _NO_TIME for finding in self.findings)


@check_arguments
def discover(
    graph: Graph,
    *,
    custom: bool = True,
    aten: bool = True,
    store: KeyValueStore | None = None,
    time_limit: Wait = TIME_LIMIT,
) -> Discovery:
    """Find rules for the operators of a program that have none, by running them.

    Operators run in this process, on small tensors. Those that are not of ATen must be
    registered with torch, by importing the module that defines them.

    Args:
        graph: the program. Calls that already have a rule are skipped.
        custom: True to try operators that are not part of ATen.
        aten: True to try ATen operators.
        store: cache for the rules of ATen operators. Custom operators are always tried again,
            since their implementation may change.
        time_limit: seconds for all operators; operators not tried in time get no rule.

    Returns:
        The program with at most `MAX_RULES` rules, the limit of the graph format.

    Raises:
        UnsupportedError: an operator draws random numbers, and no plan can specify which ranks
            must draw the same ones.
    """
    deadline = time.monotonic() + time_limit
    findings: list[Finding] = []
    rules: list[CallRule] = []
    with _one_thread():
        for nodes in _kinds(graph):
            operator = nodes[0].operator
            if not (aten if operator.startswith("aten.") else custom):
                continue
            if len(graph.rules) + len(rules) < MAX_RULES:
                finding = _finding(call_of(graph, nodes[0]), nodes, store, deadline)
            else:
                reason = f"the program already has {MAX_RULES} rules, which is the limit"
                finding = Finding(operator, _names(nodes), None, reason)
            findings.append(finding)
            if finding.rule is not None:
                rules.append(finding.rule)
    return Discovery(with_rules(graph, rules), tuple(findings))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: for tiny tensors, threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kinds(graph: Graph) -> Iterator[list[Node]]:
    """Nodes without a rule, grouped by kind of call."""
    kinds: dict[object, list[Node]] = {}
    for node in graph.nodes:
        if not has_rule(node.operator) and node.inputs and graph.rule_of(node) is None:
            kinds.setdefault(graph.call_of(node), []).append(node)
    yield from kinds.values()


def _finding(
    call: Call, nodes: Iterable[Node], store: KeyValueStore | None, deadline: float
) -> Finding:
    names = _names(nodes)
    if refused := _refusal(call):
        return Finding(call.operator, names, None, refused)
    kept = store if call.operator.startswith("aten.") else None
    key = _key(call) if kept is not None else ""
    rule = None if kept is None else _read(kept.get(key), call)
    if rule is not None:
        return Finding(call.operator, names, rule)
    try:
        end = min(deadline, time.monotonic() + _TIME_PER_CALL)
        rule = RuleSearch(probe_of(call), end).rule()
        # A rule that exceeds the limits of the graph format must not get into a plan.
        rules_from_json(rules_to_json([rule]))
    except RandomOperatorError:
        raise UnsupportedError(
            f"node {names[0]!r}: {call.operator} draws random numbers, which would differ between "
            "ranks; draw them with a torch operator and pass them as an input"
        ) from None
    except (NotTriableError, SchemaError) as error:
        return Finding(call.operator, names, None, str(error))
    except OutOfTimeError:
        return Finding(call.operator, names, None, _NO_TIME)
    if kept is not None:
        kept.put(key, json.dumps(rules_to_json([rule])).encode())
    return Finding(call.operator, names, rule)


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _refusal(call: Call) -> str:
    """Reason why an ATen operator is not tried, since programs are untrusted; "" if it is."""
    namespace, _, packet = call.operator.partition(".")
    if namespace != "aten":
        return ""
    if packet.startswith("_"):
        return "internal ATen operators do not check their arguments well enough to be tried"
    for name, value in call.arguments:
        # Such as the degree of a polynomial, which is computed by a loop. NaN is none below it.
        if any(not abs(number) <= _LARGEST_SIZE for number in floats_in(value)):
            return f"its {name!r} of {value} may need too much time"
        if prod(max(abs(i), 1) for i in integers_in(value)) > _LARGEST_SIZE:
            text = list(value) if isinstance(value, tuple) else value
            return f"its {name!r} of {text} may need too much memory"
    return ""


def _key(call: Call) -> str:
    """Digest of the operator, its attributes, tensors and software versions."""
    frame = [RULES_VERSION, version("autoshard"), torch.__version__, call.operator]
    arguments = [(name, anonymous(value)) for name, value in call.arguments]
    parts = [repr(arguments), repr(call.inputs), repr(call.outputs)]
    return hashlib.sha256(json.dumps([*frame, *parts]).encode()).hexdigest()


def _read(body: bytes | None, call: Call) -> CallRule | None:
    """Parse the rule in a cache entry; None if it is damaged or belongs to another call."""
    if body is None:
        return None
    try:
        (rule,) = rules_from_json(json.loads(body))
    except (ValueError, GraphError):
        return None
    tensors = tuple((tensor.shape, tensor.dtype) for tensor in call.inputs)
    return rule if rule.call == call_key(call.operator, call.arguments, tensors) else None
