"""One configuration of a training or inference step: devices, layout, batch and options."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal

from autoshard.base.names import did_you_mean
from autoshard.costs import Optimizer
from autoshard.errors import OptionError
from autoshard.exports import read_like
from autoshard.exports.recipes import RecipeLayout
from autoshard.graph import MixedPrecision
from autoshard.mesh import Axis, Mesh, Topology, resolve_topology
from autoshard.plan.options import PlanOptions
from autoshard.plan.options.group import unknown_option
from autoshard.requests.model_configs import BatchShape
from autoshard.sizing.models import Sizes

Offload = Literal["none", "optimizer"]

_BATCH_AXES = frozenset({"dp", "ep", "replicate", "shard"})
_SEQUENCE_AXES = frozenset({"cp", "tp"})
_TOKENS = 128
_NUMBERS = frozenset({"gpus", "batch_size", "seq_length"})
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer")
_PATTERNS = frozenset({"checkpointed_modules", "float8_modules", "eager_modules"})
_ALIASES = {
    "checkpointed_module": "checkpointed_modules",
    "memory": "memory_budget",
    "recomputation": "activation_checkpointing",
}
"""Flags of the command line, and usual words, whose option has another name."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration whose memory is asked for.

    Attributes:
        gpus: number of devices.
        layout: such as `fsdp2`, `hsdp shard=8` or `megatron tp=8 sp zero1`; see `read_like`. None
            until one is chosen.
        batch_size: samples of a step, of all devices together; that of the graph if None.
        seq_length: tokens of each sample; that of the graph if None.
        mixed_precision: policy of the export, `PARAM`, `PARAM:REDUCE` or `PARAM:REDUCE:OUTPUT`;
            empty for none.
        offload: `optimizer` if the optimizer's state is in the memory of the host.
        wrap: modules that `fully_shard` wraps, as in `autoshard.sizing.wrapping`; empty to gather
            parameters as the plan does.
        topology: of the devices; its name, or None for the default.
        nodes: number of nodes, as for `make_mesh`.
        gpus_per_node: devices of a node, as for `make_mesh`.
        options: of planning; those that the layout sets are replaced where `overrides` has none.
        overrides: names of the options that are kept although the layout sets them.
    """

    gpus: int
    layout: str | None = None
    batch_size: int | None = None
    seq_length: int | None = None
    mixed_precision: str = ""
    offload: Offload = "none"
    wrap: tuple[str, ...] = ()
    topology: str | Topology | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    options: PlanOptions
    overrides: frozenset[str] = frozenset()

    @property
    def sizes(self) -> Sizes:
        """Sizes and types that the graph, which is of a micro-batch, depends on.

        Raises:
            OptionError: the micro-batches do not divide the batch.
        """
        size, number = self.batch_size, self.options.training.micro_batches
        if size is not None:
            size = BatchShape(batch_size=size).of_micro_batch(number).batch_size
        parts = self.mixed_precision.split(":") if self.mixed_precision else []
        policy = MixedPrecision(*(part or None for part in parts)) if parts else None
        return Sizes(batch_size=size, seq_length=self.seq_length, mixed_precision=policy)

    def placed(self) -> tuple[Mesh, PlanOptions]:
        """The mesh, and the options with those of the layout.

        Raises:
            OptionError: there is no such layout on so many devices.
            MeshError: there are no such devices.
        """
        found = self._read()
        if self.wrap and not (self.layout or "").startswith(("fsdp2", "hsdp")):
            raise OptionError(f"wrap is of the layouts fsdp2 and hsdp, not of {self.layout}")
        topology = resolve_topology(self.topology, self.gpus, self.nodes, self.gpus_per_node)
        mesh = Mesh(tuple(Axis(name, size) for name, size in found.axes), topology)
        given = found.options.given
        own = {name: value for name, value in given.items() if name not in self.overrides}
        options = self.options.with_values(**own, comparisons=False)
        if self.offload == "optimizer":
            options = options.with_values(optimizer=Optimizer.NONE, master_weights=False)
        return mesh, options

    def _read(self) -> RecipeLayout:
        if self.layout is None:
            raise OptionError("give a layout, such as fsdp2")
        return read_like(self.layout, num_ranks=self.gpus)

    @property
    def batch_unit(self) -> int:
        """Number of ranks that shard a micro-batch, of all micro-batches together.

        The size of the batch of a step is a multiple of it.
        """
        axes = self._read().axes
        number = self.options.training.micro_batches
        return number * prod(size for name, size in axes if name in _BATCH_AXES)

    @property
    def sequence_unit(self) -> int:
        """Number of ranks that shard a sequence, times the tokens that kernels take at once."""
        axes = self._read().axes
        return _TOKENS * prod(size for name, size in axes if name in _SEQUENCE_AXES)

    def with_setting(self, name: str, value: Any) -> "Setup":
        """The configuration with another value of a field or of an option of planning.

        Args:
            name: of the field or option; with dashes or underscores.
            value: the value, or its text. Several patterns in a text are joined by `+`.

        Raises:
            OptionError: there is no such option, or it has no such value.
        """
        key = name.replace("-", "_")
        key = _ALIASES.get(key, key)
        if key in {field.name for field in fields(self)} - {"options", "overrides", "topology"}:
            return replace(self, **{key: _own_value(key, value)})
        if key not in PlanOptions.keywords():
            known = [
                *PlanOptions.keywords(),
                *_NUMBERS,
                "layout",
                "offload",
                "mixed_precision",
                "wrap",
            ]
            raise unknown_option(key, known)
        read = PlanOptions(**{key: _option_value(key, value)})
        options = self.options.with_values(**{key: read.value(key)})
        return replace(self, options=options, overrides=self.overrides | {key})


def _own_value(key: str, value: Any) -> Any:
    if key == "offload" and value not in _OFFLOADS:
        hint = did_you_mean(str(value), _OFFLOADS) or f"; give one of {', '.join(_OFFLOADS)}"
        raise OptionError(f"there is no offload {value!r}{hint}")
    if key == "wrap":
        return _option_value("checkpointed_modules", value)
    if key == "mixed_precision":
        return "" if value in (None, "none") else str(value)
    if key in _NUMBERS | {"nodes", "gpus_per_node"}:
        return _positive(key, value)
    return value


def _positive(key: str, value: Any) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{key} is {value!r}; give a number from 1")
    return value


def _option_value(key: str, value: Any) -> Any:
    """The value of an option of planning, read if it is a text."""
    if not isinstance(value, str):
        return value
    if key in _PATTERNS:
        return () if value in ("", "none") else tuple(value.split("+"))
    if value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    return int(value) if value.isdecimal() else value


_FLAGS: Mapping[str, bool | None] = {"true": True, "yes": True, "false": False, "no": False}
