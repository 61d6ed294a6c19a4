"""Rules that came with the graph: for operators that the library knows nothing of."""

from math import prod

from autoshard.graph import CallRule
from autoshard.ops.call import Call
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import differentiable_groups


def given_rule(call: Call, rule: CallRule) -> OperatorRule:
    """The rule of a call that a rule of its graph is for.

    Raises:
        ValueError: its letters do not fit the call's tensors.
    """
    sizes = dict(rule.sizes)
    tensors = (*call.inputs, *call.outputs)
    for tensor, dims in zip(tensors, (*rule.inputs, *rule.outputs), strict=True):
        shape = tuple(prod(sizes[letter] for letter in letters) for letters in dims)
        if shape != tensor.shape:
            raise ValueError(f"the rule that came with the graph is for the shape {shape}")
    return OperatorRule(
        sizes=sizes,
        inputs=rule.inputs,
        outputs=rule.outputs,
        contracted=rule.contracted,
        whole=rule.whole,
        linear=differentiable_groups(call, rule.linear),
        addends=rule.addends,
        unaffected=rule.unaffected,
        ordered=frozenset(sizes),  # it was tried with slices, not with rows of chunks
    )
