"""Tables of rows, looked up by id."""

from collections.abc import Mapping

from autoshard.ops.call import Call, Rule
from autoshard.ops.rule import OperatorRule
from autoshard.ops.space import Space, replicated


def _embedding(call: Call) -> OperatorRule:
    """weight[v,h], ids[*] -> [*,h]: a product with one-hot rows, summed over v.

    A rank with a slice of the rows gives zeros for the ids that lie elsewhere
    (`Kernel.VOCABULARY`). Counting ids for `scale_grad_by_freq` needs all of them.
    """
    if call.flag("sparse"):
        return replicated(call)
    weight, ids = call.inputs
    space = Space(call)
    if call.flag("scale_grad_by_freq"):
        rows, places = space.fixed(weight.shape[0]), space.fixed_dims(ids.shape)
    else:
        rows, places = space.in_order(space.free(weight.shape[0])), space.free_dims(ids.shape)
    columns = space.free(weight.shape[1])
    return space.rule(
        [(rows, columns), places], [(*places, columns)], contracted=rows, linear=[{0}]
    )


def _embedding_bag(call: Call) -> OperatorRule:
    """weight[v,h], ids[n], offsets[b] -> [b,h], and three tables of integers.

    Bags have as many ids as `offsets` says, so neither ids nor bags line up with slices. The
    sum over ids of a slice of rows would be partial, but the tables would not, and a mean or
    a maximum needs the whole bag. Columns are independent; a maximum has a table entry each.
    """
    if call.flag("sparse"):
        return replicated(call)
    weight, ids, offsets, *factors = call.inputs
    space = Space(call)
    rows, columns = space.fixed(weight.shape[0]), space.free(weight.shape[1])
    entries = space.fixed_dims(ids.shape)
    bags = space.fixed(call.outputs[0].shape[0])
    ends = bags if offsets.shape[0] == call.outputs[0].shape[0] else space.fixed(offsets.shape[0])
    tables = [space.fixed_dims(table.shape) for table in call.outputs[1:]]
    if call.integer("mode", _SUM) == _MAXIMUM:
        tables[-1] = (bags, columns)
    return space.rule(
        [(rows, columns), entries, (ends,), *[entries for _ in factors]],
        [(bags, columns), *tables],
        unaffected=(1, 2, 3),
    )


_SUM, _MAXIMUM = 0, 2
"""Values of the mode of a bag."""

RULES: Mapping[str, Rule] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_bag": _embedding_bag,
}
