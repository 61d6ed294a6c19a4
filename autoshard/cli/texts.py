"""Planning options as people type them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from autoshard.costs import parse_bytes
from autoshard.errors import MeshError, OptionError
from autoshard.mesh import Topology, topology_from_json
from autoshard.plan import Algorithm, Mode, PlanOptions
from autoshard.plan.options import Recomputing, StateDType

_KINDS = {"input": "inputs", "output": "outputs", "parameter": "parameters", "node": "nodes"}
T = TypeVar("T", bound=str)


def read_sizes(text: str) -> tuple[int, ...]:
    """Size of each axis of a mesh, written as 2,4.

    Raises:
        OptionError: it is no list of whole numbers.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise OptionError(f"--mesh {text!r} is not a list of sizes such as 2,4") from None


def read_topology(text: str | None) -> str | Topology | None:
    """The topology in a file where the text ends in `.json`; otherwise the name of a preset.

    Raises:
        MeshError: the file does not describe a topology; the message names it.
    """
    if text is None or not text.endswith(".json"):
        return text
    try:
        return topology_from_json(Path(text).read_bytes())
    except MeshError as error:
        raise MeshError(f"{text}: {error}") from None


def read_options(
    *,
    mode: str,
    optimizer: str,
    master_weights: bool,
    state_dtype: str | None,
    memory: str | None,
    reshard_after_forward: str,
    activation_checkpointing: str,
    overlap: bool,
    time_limit: float,
    algo: str,
    pins: Sequence[str],
    forbid: Sequence[str],
    batch_axis: str | None,
    skip_fully_replicated: bool,
) -> PlanOptions:
    """The options of a plan.

    Args:
        mode: training or inference.
        optimizer: name of the optimizer.
        master_weights: as in `PlanOptions`.
        state_dtype: element type of the optimizer's state; None for the parameters'.
        memory: budget per device, such as 80GB; None for what the device has.
        reshard_after_forward: auto, never or always.
        activation_checkpointing: auto, never or always.
        overlap: as in `PlanOptions`.
        time_limit: seconds.
        algo: optimal or megatron.
        pins: each `KIND:NAME=LAYOUT`.
        forbid: each `COLLECTIVE` or `COLLECTIVE@AXIS`.
        batch_axis: name of an axis.
        skip_fully_replicated: as in `PlanOptions`.

    Raises:
        OptionError: one of them cannot be read; the message names it.
    """
    given = {
        "mode": _one_of(get_args(Mode), mode, "--mode"),
        "optimizer": optimizer,
        "master_weights": master_weights,
        "state_dtype": None
        if state_dtype is None
        else _one_of(get_args(StateDType), state_dtype, "--state-dtype"),
        "reshard_after_forward": _one_of(
            get_args(Recomputing), reshard_after_forward, "--reshard-after-forward"
        ),
        "activation_checkpointing": _one_of(
            get_args(Recomputing), activation_checkpointing, "--activation-checkpointing"
        ),
        "overlap": overlap,
        "memory_budget": None if memory is None else parse_bytes(memory),
        "time_limit": time_limit,
        "algo": _one_of(get_args(Algorithm), algo, "--algo"),
        "pins": _pins(pins),
        "forbid": [_forbidden(text) for text in forbid],
        "batch_axis": batch_axis,
        "skip_fully_replicated": skip_fully_replicated,
    }
    try:
        return PlanOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _one_of(choices: Iterable[T], text: str, option: str) -> T:
    every = tuple(choices)
    for choice in every:
        if choice == text:
            return choice
    raise OptionError(f"{option} {text!r} is unknown; choose {' or '.join(every)}")


def _pins(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    pins: dict[str, dict[str, str]] = {}
    for text in texts:
        kind, colon, rest = text.partition(":")
        name, equals, layout = rest.partition("=")
        if not colon or not equals or kind not in _KINDS:
            raise OptionError(
                f"--pin {text!r} is not KIND:NAME=LAYOUT with KIND {', '.join(_KINDS)}, "
                "such as 'parameter:*.weight=S(0),R'"
            )
        same = pins.setdefault(_KINDS[kind], {})
        if same.setdefault(name, layout) != layout:
            raise OptionError(f"--pin {kind}:{name} is given twice, as {same[name]} and {layout}")
    return pins


def _forbidden(text: str) -> dict[str, Any]:
    kind, _, axis = text.partition("@")
    return {"kind": kind, "axis": axis or None}
