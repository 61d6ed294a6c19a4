"""Options of the runtime: which framework executes the layout, and how.

autoshard's own runtime is the default. A *runtime profile* says how another framework would execute
the same layout; `runtime_profiles.json` has those that are known by name.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from autoshard.base.arguments import Flag, Number
from autoshard.base.names import did_you_mean
from autoshard.base.quantities import ByteCount
from autoshard.plan.options.group import Declared, OptionGroup, Patterns

ExecutionMode = Literal["eager", "compile"]
AttentionKernel = Literal[
    "auto",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "cudnn_attention",
    "math",
]

OWN_RUNTIME = "autoshard"
"""The runtime of `parallelize`."""

_OWN_FIELDS = frozenset({"name", "execution", "overlap"})
"""Fields that say how autoshard's own runtime executes a layout, too."""


class RuntimeOptions(OptionGroup):
    """Runtime that executes a layout, and how it does."""

    title: ClassVar[str] = "Runtime"

    name: Annotated[
        str,
        Declared(keyword="runtime", flags=("--runtime",), metavar="NAME|FILE"),
    ] = Field(
        default=OWN_RUNTIME,
        max_length=64,
        description=(
            "framework that executes the layout: autoshard, or megatron-core, torchtitan or fsdp2, "
            "whose profile sets the fields below, or other, which leaves them to be set. A plan "
            "for another runtime predicts what that framework takes; `parallelize` refuses it."
        ),
    )
    execution: ExecutionMode = Field(
        default="eager",
        description=(
            "how operators run. eager: each as kernels of its own, which the host launches. "
            "compile: by torch.compile, which fuses pointwise operators, normalisations and "
            "reductions of a layer that follow each other, and saves less for backward."
        ),
    )
    overlap: Flag | None = Field(
        default=None,
        description=(
            "whether parameter gathers and gradient reductions overlap with the compute of the "
            "operators that read the parameters; then only the rest of them costs time. If null, "
            "they do on devices with rates of kernels, such as most presets of GPUs: there the "
            "share of the compute that they slow down is known."
        ),
    )
    eager_modules: Patterns = Field(
        default=(),
        description=(
            "with execution compile, modules whose operators run one by one all the same, such as "
            "those that torch.compiler.disable leaves out: dotted paths or patterns, as in "
            "float8_modules."
        ),
    )
    attention_kernel: AttentionKernel = Field(
        default="auto",
        description=(
            "kernel of scaled dot-product attention, for devices with rates of kernels. auto: the "
            "first of the device. math: products and a softmax, with all scores in memory; these "
            "are not counted as saved tensors."
        ),
    )
    float8_modules: Patterns = Field(
        default=(),
        description=(
            "modules whose linear layers multiply 16-bit activations and weights in float8, as "
            "after torchao's convert_to_float8_training: dotted paths, or patterns in which `*` "
            "matches any text, such as `layers.*`. The casts are part of the price."
        ),
    )
    float8_saved_inputs: Flag = Field(
        default=False,
        description=(
            "whether products in float8 save their 16-bit inputs for backward in float8, as in "
            "Transformer Engine; torchao's save them in 16 bits."
        ),
    )
    float8_weights_once: Flag = Field(
        default=False,
        description=(
            "whether weights are cast to float8 once per training step, as by Transformer Engine, "
            "instead of in every micro-batch."
        ),
    )
    fused_gradient_accumulation: Flag = Field(
        default=False,
        description=(
            "whether products that compute gradients add them to the sum over micro-batches, as "
            "Megatron-LM's kernels do, instead of a pass of its own."
        ),
    )
    foreach_optimizer: Flag = Field(
        default=False,
        description=(
            "whether the optimizer updates parameters by several passes over all of them "
            "(foreach=True of torch.optim), instead of one (fused=True)."
        ),
    )
    bucket_bytes: ByteCount | None = Field(
        default=None,
        description=(
            "size of the buckets in which a framework gathers parameters and reduces gradients, "
            "bytes of the whole parameters or a text such as '1GB': a smaller parameter is charged "
            "its share of one collective. If null, as here: small parameters share 8 MiB."
        ),
    )
    activation_overlap: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of the collectives of what a matrix product or attention reads or makes that a "
            "framework hides by computing it in parts (userbuffers of Transformer Engine, ring "
            "attention): only the rest is charged."
        ),
    )
    balanced_attention: Flag = Field(
        default=False,
        description=(
            "whether ranks that share the queries of causal attention are charged equal work, as "
            "in frameworks that give each an early and a late part of the sequence (context "
            "parallelism of Megatron-LM and torchtitan); else the work of the last queries."
        ),
    )
    dispatch_share: Number = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "share of the rows between tokens and experts that are sent and waited for: 1 for one "
            "row for each expert of a token; less if a token is sent once to a rank or node that "
            "has several of its experts (DeepEP, HybridEP), or beside other compute."
        ),
    )
    weighted_activations: Flag = Field(
        default=False,
        description=(
            "whether the weights of a token's experts multiply the activation inside the experts, "
            "as in Megatron-Core, so that what experts return is not kept for the gradients of "
            "these weights; here they multiply what experts return, which is kept."
        ),
    )
    expert_launch: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "seconds that the host needs to launch a product of one expert, if a framework "
            "multiplies the experts of a rank one after the other, forward and backward; 0 if one "
            "kernel multiplies all."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _with_profile(cls, given: Any) -> Any:
        """Set the fields of the profile that the name stands for, where they are not given."""
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            return given
        return {**runtime_profiles().get(given["name"], {}), **given}

    @model_validator(mode="after")
    def _is_known(self) -> "RuntimeOptions":
        if self.name not in (known := [OWN_RUNTIME, *runtime_profiles()]):
            hint = did_you_mean(self.name, known) or f"; the runtimes are {', '.join(known)}"
            raise ValueError(f"there is no runtime {self.name!r}{hint}")
        if self.name == OWN_RUNTIME and (foreign := self.foreign_fields):
            raise ValueError(
                f"{', '.join(foreign)}: the runtime of autoshard does not do that; name the "
                f"framework that does, such as runtime='megatron-core', or runtime='other'"
            )
        return self

    @property
    def foreign_fields(self) -> tuple[str, ...]:
        """The fields of a profile that differ from how autoshard executes a layout."""
        fields = type(self).model_fields
        names = self.profile_fields()
        return tuple(name for name in names if getattr(self, name) != fields[name].default)

    @classmethod
    def flags(cls) -> dict[str, tuple[str, ...]]:
        """The flags on the command line; a profile is given there as a whole."""
        profile = cls.profile_fields()
        return {name: flags for name, flags in super().flags().items() if name not in profile}

    @classmethod
    def profile_fields(cls) -> tuple[str, ...]:
        """The fields that a profile of another framework may set."""
        return tuple(name for name in cls.model_fields if name not in _OWN_FIELDS)


def runtime_profiles() -> Mapping[str, Mapping[str, Any]]:
    """The fields that each known runtime other than autoshard sets, by its name."""
    return {name: profile["sets"] for name, profile in described_profiles().items()}


@cache
def described_profiles() -> Mapping[str, Mapping[str, Any]]:
    """The profile of each runtime: a sentence about it, its source, and the fields that it sets."""
    text = files("autoshard.plan.options").joinpath("runtime_profiles.json").read_text("utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found
