"""Mixed precision: element types of computations, of reductions of gradients, and of results."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import ConfigDict

from autoshard.base.arguments import check_methods
from autoshard.errors import OptionError
from autoshard.graph.dtype import DType

_SHORT = {
    "bf16": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "fp32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "fp64": DType.FLOAT64,
    "double": DType.FLOAT64,
}
_FLOATING = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


@check_methods
@dataclass(frozen=True, init=False)
class MixedPrecision:
    """A mixed-precision policy with the meaning of FSDP2's `MixedPrecisionPolicy`.

    Parameters stay in their own element type, in which the optimizer updates them; so do buffers.
    The policy is that of the whole model, as in `fully_shard(model, mp_policy=...)`.

    Attributes:
        param_dtype: element type to which floating-point parameters are converted before use, and
            so that of most operators and of gathers of parameters; their own if None.
        reduce_dtype: element type in which gradients of parameters are summed over ranks, and over
            micro-batches before that; that of the gradients if None.
        output_dtype: element type to which floating-point results of forward are converted.
        cast_forward_inputs: True to convert floating-point arguments of forward to `param_dtype`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    output_dtype: DType | None = None
    cast_forward_inputs: bool = True

    def __init__(
        self,
        param_dtype: Any = None,
        reduce_dtype: Any = None,
        output_dtype: Any = None,
        *,
        cast_forward_inputs: bool = True,
    ) -> None:
        """Make a policy; element types may be torch's or names such as "bfloat16" or "bf16".

        Raises:
            OptionError: an element type is not a floating-point one.
        """
        dtypes = (param_dtype, reduce_dtype, output_dtype)
        for name, given in zip(_FIELDS, dtypes, strict=False):
            object.__setattr__(self, name, None if given is None else _floating(name, given))
        object.__setattr__(self, "cast_forward_inputs", cast_forward_inputs)

    @classmethod
    def of(cls, policy: Any) -> Self:
        """The policy that an argument means.

        Args:
            policy: a policy, this class's or torch's `MixedPrecisionPolicy`, or a `param_dtype`.

        Raises:
            OptionError: it is neither a policy nor a floating-point element type.
        """
        if isinstance(policy, cls):
            return policy
        given = [getattr(policy, name, cls) for name in _FIELDS]
        if cls not in given and not isinstance(policy, type):
            *dtypes, casts = given
            return cls(*dtypes, cast_forward_inputs=bool(casts))
        return cls(_floating("mixed_precision", policy))


def _floating(name: str, given: Any) -> DType:
    """The element type that torch's object or a text names."""
    text = str(given).removeprefix("torch.")
    found = next((d for d in _FLOATING if d.value == text), _SHORT.get(text))
    if found is None:
        policy = " or an autoshard.MixedPrecision" if name == "mixed_precision" else ""
        raise OptionError(
            f"{name} is {given!r}; pass one of {', '.join(_FLOATING)}, as text or as torch's "
            f"dtype{policy}"
        )
    return found
