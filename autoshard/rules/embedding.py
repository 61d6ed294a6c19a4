"""Tables of rows, looked up by id."""

from collections.abc import Mapping

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import OperatorRule
from autoshard.rules.space import Space, replicated


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
        rows, places = space.free(weight.shape[0]), space.free_dims(ids.shape)
    columns = space.free(weight.shape[1])
    return space.rule(
        [(rows, columns), places], [(*places, columns)], contracted=rows, linear=[{0}]
    )


RULES: Mapping[str, Rule] = {
    "aten.embedding.default": _embedding,
}
