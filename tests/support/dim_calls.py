"""Calls of every ATen operator that has dims among its arguments."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import permutations, product
from typing import Any

import torch

MOST_DIMS = 3
RANKS = range(MOST_DIMS + 1)
SIZE = 3
"""Of every dim, so that a wrong dim gives other numbers instead of an error."""

NO_DIMS = {
    ("tile", "dims"): "How often each dim is repeated.",
    ("_sobol_engine_draw", "dimension"): "The number of dimensions of a random point.",
}
NOT_RUN = {
    "*_batch_dim.*": "Parts of vmap.",
    "*_multi_head_attention.*": "Its embed_dim is a size.",
    "*backward*": "Derivatives, which no export has.",
    "*jvp*": "Derivatives, which no export has.",
    "*named*": "Dims by name.",
    "*per_channel*": "Quantised tensors.",
    "*sparse*": "Sparse tensors.",
    "*stride.*": "It returns no tensor.",
    "_chunk_cat.*": "A part of FSDP.",
    "_cufft*": "A setting.",
    "_fft_*": "The part of a transform that a device computes.",
    "_mkldnn*": "Tensors in the memory layout of a library.",
    "_nested*": "Nested tensors.",
    "_quant*": "Quantised tensors.",
    "_scaled_*mm*": "Products of float8 on GPUs.",
    "_transformer_encoder*": "Its embed_dim is a size.",
    "_trilinear.*": "A part of bilinear.",
    "_weight_norm_interface.*": "It reads beyond memory if its dim is not the first or the last.",
    "native_norm.*": "No implementation on CPUs.",
    "segment_reduce.*": "Its axis is 0.",
    "size.*": "It returns no tensor.",
    "slice_inverse.*": "It has no dims of its own: it looks at the memory.",
    "sym_size.*": "It returns no tensor.",
}
"""Patterns of names of operators that cannot be called in this way, and why."""


def real(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def indices(*shape: int) -> torch.Tensor:
    return torch.arange(SIZE).repeat(SIZE**MOST_DIMS)[: SIZE ** len(shape)].reshape(shape)


FIXED: dict[str, Any] = {
    "approximate": "none",
    "chunks": 2,
    "half_to_float": False,
    "include_self": True,
    "indices": [1],
    "index": 0,
    "k": 2,
    "keepdim": False,
    "length": 2,
    "maxnorm": 1.0,
    "ord": 2.0,
    "p": 2.0,
    "q": 0.5,
    "reduce": "sum",
    "repeats": 2,
    "sections": 2,
    "shifts": [1],
    "size": 2,
    "sizes": [3, 1],
    "spacing": 1.0,
    "split_size": 1,
    "split_sizes": [1, 2],
    "stable": True,
    "start": 0,
    "step": 1,
    "unbiased": True,
    "value": 1.0,
    "dtype": torch.float64,
}
"""Arguments by name that are the same in every call."""
OVERLOADS: dict[str, dict[str, Any]] = {
    "_masked_softmax.default": {"mask": lambda shape: torch.zeros(shape, dtype=torch.bool)},
    "fft_hfft2.default": {"s": None},
    "gradient.scalarrayarray": {"spacing": [1.0]},
    "gradient.scalarrayint": {"spacing": [1.0]},
    "gradient.tensorarray": {"spacing": lambda _: [torch.arange(3.0, dtype=torch.float64)]},
    "gradient.tensorarrayint": {"spacing": lambda _: [torch.arange(3.0, dtype=torch.float64)]},
    "index_add.default": {"index": lambda _: torch.arange(SIZE)},
    "index_reduce.default": {"index": lambda _: torch.arange(SIZE), "reduce": "amax"},
    "linalg_matrix_norm.str_ord": {"ord": "fro"},
    "linalg_norm.ord_str": {"ord": "fro"},
    "narrow.Tensor": {"start": lambda _: torch.tensor(1)},
    "quantile.default": {"q": lambda _: torch.tensor(0.5, dtype=torch.float64)},
    "nanquantile.default": {"q": lambda _: torch.tensor(0.5, dtype=torch.float64)},
    "repeat_interleave.self_Tensor": {"repeats": lambda _: torch.tensor([1, 2, 1])},
    "scatter.reduce": {"reduce": "add"},
    "scatter.value_reduce": {"reduce": "add"},
    "select_scatter.default": {"src": lambda shape: real(*shape[:-1])},
    "unique_consecutive.default": {"return_inverse": True, "return_counts": True},
    "diagonal_scatter.default": {"src": lambda shape: real(*shape[:-1])},
    "split.sizes": {"split_size": [1, 2]},
    "tensor_split.tensor_indices_or_sections": {
        "tensor_indices_or_sections": lambda _: torch.tensor([1])
    },
    "glu.default": {"self": lambda shape: real(*(4 for _ in shape))},
}
"""Arguments of single overloads; of a shape, a function of that of the first tensor."""


def overloads() -> list[str]:
    """Every ATen operator without writes that has dims among its arguments."""
    names = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace != "aten" or found is None or found._schema.is_mutable:
            continue
        full = f"{packet}.{overload or 'default'}"
        if dims_of(full) and not any(fnmatchcase(full, pattern) for pattern in NOT_RUN):
            names.append(full)
    return names


def dims_of(name: str) -> list[str]:
    """The names of the arguments that are dims."""
    found, packet = [], name.partition(".")[0]
    for argument in overload_of(name)._schema.arguments:
        is_named = argument.name.startswith(("dim", "axis", "source", "destination"))
        is_named |= argument.name.endswith("_dim")
        is_dim = is_named and (packet, argument.name) not in NO_DIMS
        if is_dim and "int" in str(argument.type):
            found.append(argument.name)
    return found


def overload_of(name: str) -> Any:
    """The operator with a name such as `max.dim`."""
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def accepted_calls(name: str) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """The calls of `calls` that PyTorch accepts, with their results."""
    operator = overload_of(name)
    for arguments in calls(name):
        try:
            yield arguments, flat(operator(**arguments))
        except (RuntimeError, IndexError, ValueError):
            continue


def calls(name: str) -> Iterator[dict[str, Any]]:
    """Calls with all negative dims, and first and other tensors of all ranks."""
    operator, dims = overload_of(name), dims_of(name)
    single = sum("Tensor" in str(a.type) for a in operator._schema.arguments) == 1
    is_list = {a.name: "List" in str(a.type) for a in operator._schema.arguments}
    joins = "tensors" in is_list
    for first, other in product(RANKS, RANKS if not single or joins else RANKS[:1]):
        shapes = (SIZE,) * first, (SIZE,) * other
        negative = range(-max(first, other) - 1, 0)
        options = [listed(negative, first) if is_list[dim] else list(negative) for dim in dims]
        for values in product(*options):
            given = dict(zip(dims, values, strict=True))
            arguments = arguments_of(name, operator, shapes, given)
            if name == "_weight_norm.default":
                try:
                    arguments["g"] = torch.norm_except_dim(arguments["v"], 2, given["dim"])
                except (RuntimeError, IndexError):
                    continue  # PyTorch does not check it
            yield arguments


def listed(dims: range, rank: int) -> list[list[int]]:
    """Lists of dims: of none, one, two and all."""
    every = [list(order) for order in permutations(range(-rank, 0))]
    return [[], *([d] for d in dims), *([a, b] for a, b in product(dims, dims)), *every]


def arguments_of(
    name: str, operator: Any, shapes: tuple[tuple[int, ...], ...], dims: dict[str, Any]
) -> dict[str, Any]:
    known = OVERLOADS.get(name, {})
    arguments: dict[str, Any] = {}
    tensors = iter((shapes[0], *(shapes[1:] * 3)))
    for argument in operator._schema.arguments:
        key, kind = argument.name, str(argument.type)
        if key in dims:
            arguments[key] = dims[key]
        elif key in known:
            value = known[key]
            arguments[key] = value(shapes[0]) if callable(value) else value
            if isinstance(arguments[key], torch.Tensor):
                next(tensors)
        elif kind == "Tensor":
            shape = next(tensors)
            arguments[key] = indices(*shape) if key in ("index", "indices") else real(*shape)
        elif kind == "List[Tensor]":
            arguments[key] = [real(*next(tensors)), real(*next(tensors))]
        elif not argument.has_default_value():
            arguments[key] = FIXED[key] if not kind.startswith("Optional") else FIXED.get(key)
    return arguments


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [x for r in result for x in flat(r)]
