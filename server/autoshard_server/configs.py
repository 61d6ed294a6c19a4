"""Configs of transformers in requests: what arithmetic refuses before anything is built."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from autoshard.errors import OptionError
from autoshard.plan import Mode
from autoshard.requests.model_configs import BatchShape, ElementType, num_positions
from autoshard_server.digests import digest, transformers_version, versions
from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.settings import Settings

_CODE = re.compile(r"auto_map|trust_remote_code|custom_pipelines|.*_implementation")
"""Members that name code or kernels to load."""

_LAYERS = re.compile(r"(.*_)?(layers?|blocks|depths?)")
_BASES = re.compile(r".*(theta|base|base_freq)")
"""Names of numbers that are no sizes: bases of rotary positions."""

_COUNTS = re.compile(r"(num|n|d)_.*|(.*_)?(size|dim|heads?|layers?|blocks|depths?)")
"""Names of numbers that cannot be negative; others may be -1, such as ids of missing tokens."""

_SENTINELS = frozenset({"chunk_size"})
"""Names of sizes that are -1 for none."""


class ConfigExport:
    """The export of the model of a config; all that arithmetic can check is checked.

    Args:
        config: the config.json of a stranger.
        batch: to export the model with.
        dtype: element type of the weights; that of the config if None.
        mode: whether a loss is part of the graph.
        settings: limits of this service.

    Attributes:
        fields: what the config is exported with.
        payload: the config as JSON.
        digest: of both, and of the versions that export.

    Raises:
        ServerError: CONFIG or LIMIT.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        batch: BatchShape,
        dtype: ElementType | None,
        mode: Mode,
        settings: Settings,
    ) -> None:
        _check(config, batch, settings)
        self.fields = {**asdict(batch), "dtype": dtype, "mode": mode}
        self.payload = json.dumps(config).encode()
        self.digest = digest(*versions(), transformers_version(), config, self.fields)


def _check(config: Mapping[str, Any], batch: BatchShape, settings: Settings) -> None:
    """Refuse a config that names code, or whose model would be too large."""
    if not isinstance(config.get("model_type"), str):
        raise _refused("it has no text 'model_type'")
    for name, value in _members(config):
        if _CODE.fullmatch(name):
            raise _refused(
                f"{name!r} names code to load, and only classes of the installed transformers are "
                "used; leave it out"
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value, settings)
    try:
        tokens = batch.num_tokens(num_positions(config), "the config")
    except OptionError as error:
        raise ServerError(ProblemType.CONFIG, str(error)) from None
    for name, number in (("batch_size", batch.batch_size), ("seq_length", tokens)):
        _check_number(name, number, settings)


def _members(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every member at any depth; an entry of a list has the name of the list."""
    found: list[tuple[str, Any]] = list(config.items())
    while found:
        name, value = found.pop()
        yield name, value
        if isinstance(value, dict):
            found += value.items()
        elif isinstance(value, list):
            found += [(name, entry) for entry in value if not isinstance(entry, str)]


def _check_number(name: str, value: float, settings: Settings) -> None:
    shown = name[:64]
    if isinstance(value, float) and not isfinite(value):
        raise _refused(f"{shown!r} is no finite number")
    if value < 0 and _COUNTS.fullmatch(name) and name not in _SENTINELS:
        raise _refused(f"{shown!r} is negative")
    if _LAYERS.fullmatch(name):
        setting = "max_config_layers"
    elif name.startswith("num_"):
        setting = "max_config_count"
    elif isinstance(value, float) or _BASES.fullmatch(name):
        return
    else:
        setting = "max_config_number"
    limit = getattr(settings, setting)
    if abs(value) > limit:
        detail = f"{shown!r} of the config exceeds this service's limit of {limit:,}"
        raise limit_error(ProblemType.LIMIT, detail, setting, limit)


def _refused(reason: str) -> ServerError:
    return ServerError(ProblemType.CONFIG, f"the config cannot be used: {reason}")
