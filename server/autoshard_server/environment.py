"""Reading the settings from the environment; a mistake there is an error of one line."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from autoshard.errors import OptionError
from autoshard_server.settings import PREFIX, Settings

OTHER_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("API_KEY", "API_KEY_FILE", "CACHE", "SERVER"),  # of clients
        *("ANY_TORCH", "FAILURES", "PLAN", "TIMING"),  # of launched programs
        *("DB_PASSWORD", "IMAGE"),  # of deploy/compose.yaml
    )
)
"""Variables with the prefix that are not settings of the service."""

_OPTIONS = ("host", "port", "uds", "tls_cert", "tls_key", "log_level")
"""Options of `autoshard serve` that have no variable."""

_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
"""Variables that every pod gets for a Service whose name starts with `autoshard`."""

_KUBERNETES_LINK = re.compile(r"(tcp|udp|sctp)://.*")
"""Values of such variables whose names end in _PORT."""


def load_settings(**given: Any) -> Settings:
    """The settings of the environment; given values that are not None replace them.

    Raises:
        OptionError: a variable is not a setting, or a value is invalid.
    """
    _refuse_unknown(os.environ)
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise OptionError("; ".join(map(_described, error.errors()))) from None
    except SettingsError as error:
        # A list or an object that is not JSON.
        raise OptionError(f"{error}; write the value as JSON") from None


def _refuse_unknown(variables: Mapping[str, str]) -> None:
    """Refuse variables with the prefix that nothing reads, such as a setting spelled wrongly.

    Raises:
        OptionError: there is one.
    """
    known = OTHER_VARIABLES.union(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)
    for name, value in sorted(variables.items()):
        full = name.upper()
        is_ours = full.startswith(PREFIX) and not _is_of_kubernetes(full, value)
        if is_ours and full not in known:
            raise OptionError(f"{name} is not a setting of the service; {_remedy(full)}")


def _is_of_kubernetes(name: str, value: str) -> bool:
    is_link = name.endswith("_PORT") and _KUBERNETES_LINK.fullmatch(value) is not None
    return is_link or _KUBERNETES.fullmatch(name) is not None


def _remedy(variable: str) -> str:
    name = variable.removeprefix(PREFIX).lower()
    if name in _OPTIONS:
        return f"use the option --{name.replace('_', '-')} of `autoshard serve`"
    for close in get_close_matches(name, Settings.model_fields, n=1):
        return f"did you mean {PREFIX}{close.upper()}?"
    return "docs/settings.md lists all settings"


def _described(error: Any) -> str:
    """A validation error in words; without the value if that may contain a password."""
    name = ".".join(map(str, error["loc"]))
    value = "" if name == "store_url" else f"={error['input']!r}"
    reason = str(error["msg"]).removeprefix("Value error, ")
    return f"{PREFIX}{name.upper()}{value}: {reason}"
