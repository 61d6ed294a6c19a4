"""The page of all operators: `python -m autoshard.ops.table` writes docs/operators.md."""

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod
from pathlib import Path

from autoshard.graph import Argument, DType, Ref, Tensor
from autoshard.layouts import P
from autoshard.ops.call import Call
from autoshard.ops.examples import EXAMPLES, SIZES, ExampleCall
from autoshard.ops.kept import Extra
from autoshard.ops.local_kernels import Kernel, kernel_for
from autoshard.ops.registry import FAMILIES, rule_for
from autoshard.ops.rule import AxisRule, OperatorRule, axis_rules
from autoshard.ops.saved import saved_by
from autoshard.ops.space import replicated
from autoshard.ops.uncut import GONE, UNCUT

_HEAD = """# Operators

What one axis of the mesh may do to each operator, beside running it whole everywhere. This page
is made from the rules by `python -m autoshard.ops.table`.

* **cut**: dims that may be cut, in every tensor that has them. Tensors that lack the dim are the
  same on all ranks, and their gradients are summed.
* **summed**: dims that may be cut, after which the output is to be summed over the ranks.
* **inside**: dims of those that may be cut where ranks then run all-reduces inside the operator,
  with the numbers per row that each puts together, forward | backward; where an all-to-all
  brings rows to the ranks of their experts (`move`); or where ranks exchange the edges of their
  slices with those next to them, so many elements from before and behind (`halo 1+1`).
* **sums**: inputs that may be such sums themselves, as the output then is; `a + b` at once.
* **kept**: what is kept for backward if every input has a gradient.
* **on a rank**: what a rank does otherwise than the whole program (`Kernel`, `draws` random
  numbers).

A dim `(g c)` is a product: its outer factor may be cut, the inner one once the outer is used up.
A dim that is part of no product in any tensor of a call may also be cut by an axis that does not
divide it, if that axis alone cuts it: all ranks but the last have slices of one length.
"""

_REST = """
## All operators with a rule

A name without an overload stands for all of them. An operator that is not listed runs whole,
which is right for every deterministic one. An operator that writes into its input is planned as
the one that does not, `add_` as `add`.
"""

_TENSOR = re.compile(r"(\w*)(\*?):?(\w*)\[([^\]]*)\]")


def page() -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for family, examples in EXAMPLES.items():
        parts.append(f"\n## {family}\n\n")
        parts.append("| operator | call | cut | summed | inside | sums | kept | on a rank |\n")
        parts.append("|---|---|---|---|---|---|---|---|\n")
        parts.extend(f"| {' | '.join(_row(example))} |\n" for example in examples)
    parts.append(_REST)
    parts.extend(_families())
    parts.append("\n## What is not cut, and why\n\n| operators | reason |\n|---|---|\n")
    parts.extend(f"| {_names(names.split())} | {why} |\n" for names, why in UNCUT.items())
    parts.append(
        "\n## What comes to no rule\n\n| in the export | what becomes of it |\n|---|---|\n"
    )
    parts.extend(f"| {_names(names.split())} | {what} |\n" for names, what in GONE.items())
    return "".join(parts)


def call_of_example(example: ExampleCall) -> Call:
    """The call of an example.

    Raises:
        KeyError: a dim has a name without a size.
    """
    inputs, outputs = (_Tensors(text) for text in example.tensors.split("->"))
    given: dict[str, Argument] = {}
    for (name, listed), group in groupby(zip(inputs.names, inputs.listed, strict=True)):
        count = len(list(group))
        given[name] = (Ref(name),) * count if listed else Ref(name)
    return Call(
        operator=f"{example.namespace}.{example.operator}",
        arguments=(*given.items(), *example.arguments.items()),
        inputs=inputs.tensors,
        outputs=outputs.tensors,
    )


class _Tensors:
    """The tensors on one side of an example.

    Attributes:
        names: name of each; empty for outputs.
        listed: whether each is one of a list.
        dims: factors of each dim of each.
        tensors: their shapes.
    """

    def __init__(self, text: str) -> None:
        found = _TENSOR.findall(text)
        self.names = [name for name, _, _, _ in found]
        self.listed = [bool(star) for _, star, _, _ in found]
        self.dims = [
            [dim.strip("()").split() for dim in dims.split(",") if dim] for *_, dims in found
        ]
        self.tensors = tuple(
            Tensor(tuple(prod(map(_size, dim)) for dim in dims), dtype, dtype.is_differentiable)
            for (_, _, kind, _), dims in zip(found, self.dims, strict=True)
            for dtype in [DType(kind or "float32")]
        )


def _size(factor: str) -> int:
    return int(factor) if factor.isdigit() else SIZES[factor]


def _row(example: ExampleCall) -> Iterator[str]:
    call = call_of_example(example)
    inputs, outputs = (_Tensors(text) for text in example.tensors.split("->"))
    dims = [*inputs.dims, *outputs.dims]
    rule = rule_for(call)
    options = [option for option in axis_rules(rule, 2) if option.letter is not None]
    yield f"`{example.name}`"
    plain = example.tensors.replace("*", "").replace(" :", " ").strip()
    yield f"`{plain}`"
    yield _listed(_cut_dim(option, dims) for option in options if P not in option.outputs)
    yield _listed(_cut_dim(option, dims) for option in options if P in option.outputs)
    yield _inside(rule, dims)
    groups = (dict.fromkeys(inputs.names[i] for i in sorted(group)) for group in rule.linear)
    yield _listed(" + ".join(group) for group in groups)
    yield _listed(_kept(call, dims))
    kernel = kernel_for(call.operator)
    kinds = [str(kernel.kind)] if kernel.kind is not Kernel.PLAIN else []
    yield _listed([*kinds, *(["draws"] if kernel.draws is not None else [])])


def _listed(items: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(items)) or "-"


def _inside(rule: OperatorRule, dims: list[list[list[str]]]) -> str:
    """What runs inside, by the names of the dims that it is for."""
    if not rule.communicates:
        return "-"
    # Letters are handed out one per factor.
    names = {
        letter: name
        for tensor, named in zip((*rule.inputs, *rule.outputs), dims, strict=True)
        for letters, factors in zip(tensor, named, strict=True)
        if len(letters) == len(factors)
        for letter, name in zip(letters, factors, strict=True)
    }
    if rule.halo.edges:
        return _listed(
            f"{names[letter]}: `halo {edges.before}+{edges.after}`"
            for letter, edges in rule.halo.edges.items()
        )
    over = _listed(names[letter] for letter in rule.sizes if letter in rule.reduced.over)
    return f"{over}: `{rule.reduced}`".replace("|", "\\|")


def _cut_dim(option: AxisRule, dims: list[list[list[str]]]) -> str:
    """Name of the dim that an option cuts."""
    cuts = zip((*option.inputs, *option.outputs), dims, strict=True)
    return next(names[t.dim][0] for t, names in cuts if t.is_shard)


def _kept(call: Call, dims: list[list[list[str]]]) -> Iterator[str]:
    saved = saved_by(call, [tensor.dtype.is_differentiable for tensor in call.inputs])
    yield from (call.names[i] for i in sorted(saved.inputs))
    yield from ("output" if i == 0 else f"output {i}" for i in sorted(saved.outputs))
    for extra in saved.extras:
        yield _per_element(extra, dims)


def _per_element(extra: Extra, dims: list[list[list[str]]]) -> str:
    names = " ".join(factor for i, dim in extra.dims for factor in dims[i][dim])
    return f"{extra.times * extra.itemsize} B per ({names})"


def _families() -> Iterator[str]:
    """Each family's operators, those first that are cut."""
    for family in FAMILIES:
        title = (family.__doc__ or "").partition("\n")[0]
        cut = [name for name, rule in family.RULES.items() if rule is not replicated]
        whole = [name for name, rule in family.RULES.items() if rule is replicated]
        yield f"\n**{title}** {_names(cut)}\n"
        if whole:
            yield f"\nRun whole: {_names(whole)}\n"


def _names(operators: Iterable[str]) -> str:
    return ", ".join(f"`{name.removeprefix('aten.')}`" for name in operators)


def main() -> None:
    """Write the page under docs/, or in the folder that is given."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    (folder / "operators.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
