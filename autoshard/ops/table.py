"""Generator of docs/operators.md and docs/operators.csv: `python -m autoshard.ops.table`."""

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path

from autoshard.layouts import P
from autoshard.ops.examples import Example, examples_of
from autoshard.ops.registry import FAMILIES, SPECS, rule_for, saved_tensors
from autoshard.ops.rules.index_space import replicated
from autoshard.ops.rules.rule import AxisRule, OperatorRule, axis_rules
from autoshard.ops.rules.spec import Call, ExtraTensor, Kernel, OperatorSpec

_HEAD = """# Operators

[operators.csv](operators.csv) has all operators with a rule. It and this page are generated from
the specs by `python -m autoshard.ops.table`. Operators that are not listed are
replicated, which is valid for every deterministic operator. A name without an overload stands for
all overloads. In-place operators are planned in their functional form, `add_` as `add`.

It has the options of one mesh axis for an example of each rule, besides running it replicated:

* **sharded**: dims that may be sharded, in every tensor that has them. Tensors that lack the dim
  are replicated, and their gradients are all-reduced.
* **summed**: dims that may be sharded, and make the output partial.
* **inside**: the sharded dims for which ranks run collectives inside the operator: all-reduces,
  with the numbers per row of each, forward | backward; an all-to-all that sends rows to the ranks
  of their experts (`move`); or a halo exchange with the numbers of elements before and after the
  shard (`halo 1+1`).
* **partial**: inputs that may be partial, as the output then is; `a + b` together.
* **saved**: tensors that autograd saves if every input has a gradient.
* **local call**: how the call changes on a rank (`Kernel`); `draws` random numbers.

A dim `(g c)` is a product: its outer factor may be sharded, and its inner factor once the outer
one is exhausted. A dim that is not part of a product in any tensor of a call may also be sharded
unevenly, by a single axis that does not divide it; all ranks except the last then have shards of
equal length.
"""

_COLUMNS = (
    *("family", "operator", "call", "sharded", "summed"),
    *("inside", "partial", "saved", "local call"),
)

NOT_PLANNED: Mapping[str, str] = {
    "_assert_tensor_metadata.default _assert_scalar.default _assert_async.default": "Removed.",
    "_operator.getitem": "Outputs are values of their own.",
    "sym_size.int _operator.mul _operator.le _operator.ge _operator.eq torch.sym_ite": "Sizes are "
    "those of the example inputs.",
    "item.default": "Removed if the number is not used; otherwise an error, because sizes "
    "would depend on the data.",
    "alias.default clone.default contiguous.default detach_.default to.device": "Removed: memory "
    "formats do not matter, and all tensors of a rank are on its device.",
    "copy_.default": "The source, cast and expanded.",
    "broadcast_tensors.default": "One `expand` per tensor.",
    "wrap_with_set_grad_enabled": "Its body, with a `detach` of each input.",
    "wrap_with_autocast": "Its body if autocast is off; an error if on, since casts depend on "
    "the device.",
    "flex_attention": "An error: its score function is a separate program.",
    "flat_apply torch._functorch.predispatch._add_batch_dim "
    "torch._functorch.predispatch._remove_batch_dim "
    "torch._functorch.predispatch._vmap_increment_nesting "
    "torch._functorch.predispatch._vmap_decrement_nesting "
    "torch._functorch.predispatch.lazy_load_decompositions": "Cannot be run: calls of Python "
    "in the program, of `vmap` and of pytrees. Write the batched form.",
}
"""Operators of exports that never appear in plans, and how they are handled."""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD, "\n| family | operators | number |\n|---|---|---:|\n", *_families()]
    parts.append("\n## Dims that are not sharded, and why\n\n| operators | reason |\n|---|---|\n")
    reasons: dict[str, list[str]] = {}
    for name, spec in SPECS.items():
        if spec.unsharded:
            reasons.setdefault(spec.unsharded, []).append(name)
    parts.extend(f"| {_names(names)} | {reason} |\n" for reason, names in reasons.items())
    parts.append(
        "\n## Operators that are not planned\n\n| in the export | treatment |\n|---|---|\n"
    )
    parts.extend(f"| {_names(names.split())} | {what} |\n" for names, what in NOT_PLANNED.items())
    return "".join(parts)


def table() -> str:
    """Return all operators, with an example of each rule, as CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for family in FAMILIES:
        name = family.__name__.rpartition(".")[2]
        specs: tuple[OperatorSpec, ...] = family.SPECS
        for spec in specs:
            rows = [tuple(_row(spec, example)) for example in examples_of(spec)]
            writer.writerows((name, *row) for row in rows)
            others = [one for one in map(_short, spec.names) if one not in {row[0] for row in rows}]
            alone = "always replicated" if spec.rule is replicated else "as others of the family"
            call = f"as {rows[0][0]}" if rows else alone
            writer.writerows((name, operator, call) for operator in others)
    return text.getvalue()


def _families() -> Iterator[str]:
    """Rows of the families, with the number of operators of each that can be sharded."""
    for family in FAMILIES:
        title = (family.__doc__ or "").partition("\n")[0].rstrip(".")
        specs: tuple[OperatorSpec, ...] = family.SPECS
        sharded = sum(len(spec.names) for spec in specs if spec.rule is not replicated)
        yield f"| {family.__name__.rpartition('.')[2]} | {title} | {sharded} |\n"


def _row(spec: OperatorSpec, example: Example) -> Iterator[str]:
    call, dims = example.call, example.dims
    rule = rule_for(call)
    options = [option for option in axis_rules(rule, 2) if option.letter is not None]
    yield _short(call.operator)
    yield example.text
    yield _listed(_sharded_dim(option, dims) for option in options if P not in option.outputs)
    yield _listed(_sharded_dim(option, dims) for option in options if P in option.outputs)
    yield _inside(rule, dims)
    groups = (dict.fromkeys(call.names[i] for i in sorted(group)) for group in rule.linear)
    yield _listed(" + ".join(group) for group in groups)
    yield _listed(_saved(call, dims))
    kinds = [str(spec.kernel)] if spec.kernel is not Kernel.PLAIN else []
    yield _listed([*kinds, *(["draws"] if spec.draws is not None else [])])


def _listed(items: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(items)) or "-"


def _inside(rule: OperatorRule, dims: list[list[list[str]]]) -> str:
    """Collectives inside the operator, by dim name."""
    if not rule.communicates:
        return "-"
    # One letter is allocated per factor.
    names = {
        letter: name
        for tensor, named in zip((*rule.inputs, *rule.outputs), dims, strict=True)
        for letters, factors in zip(tensor, named, strict=True)
        if len(letters) == len(factors)
        for letter, name in zip(letters, factors, strict=True)
    }
    if rule.halo.edges:
        return _listed(
            f"{names[letter]}: halo {edges.before}+{edges.after}"
            for letter, edges in rule.halo.edges.items()
        )
    over = _listed(names[letter] for letter in rule.sizes if letter in rule.reduced.over)
    return f"{over}: {rule.reduced}"


def _sharded_dim(option: AxisRule, dims: list[list[list[str]]]) -> str:
    """Name of the dim that an option shards."""
    types = zip((*option.inputs, *option.outputs), dims, strict=True)
    return next(names[t.dim][0] for t, names in types if t.is_shard)


def _saved(call: Call, dims: list[list[list[str]]]) -> Iterator[str]:
    saved = saved_tensors(call, [tensor.dtype.is_differentiable for tensor in call.inputs])
    yield from (call.names[i] for i in sorted(saved.inputs))
    yield from ("output" if i == 0 else f"output {i}" for i in sorted(saved.outputs))
    for extra in saved.extras:
        yield _per_element(extra, dims)


def _per_element(extra: ExtraTensor, dims: list[list[list[str]]]) -> str:
    names = " ".join(factor for i, dim in extra.dims for factor in dims[i][dim])
    return f"{extra.times * extra.itemsize} B per ({names})"


def _names(operators: Iterable[str]) -> str:
    return ", ".join(f"`{_short(name)}`" for name in operators)


def _short(operator: str) -> str:
    return operator.removeprefix("aten.")


def main() -> None:
    """Write page and table to docs/, or to the folder given as argument."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    (folder / "operators.md").write_text(page(), encoding="utf-8")
    (folder / "operators.csv").write_text(table(), encoding="utf-8", newline="")


if __name__ == "__main__":
    main()
