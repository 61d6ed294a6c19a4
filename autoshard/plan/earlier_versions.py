"""Plan documents of earlier versions, brought into the form of this one."""

from collections.abc import Mapping
from typing import Any

from autoshard.plan.options.plan_options import grouped_document
from autoshard.plan.options.runtime import RuntimeOptions

_OTHER_RUNTIME = "other"


def upgraded(document: Any) -> Any:
    """A plan document in the form of this version.

    Version 1 had options without groups, and no runtime: options of another framework's were
    accepted by themselves.

    Args:
        document: parsed JSON of any version; one of this version, or of none that is known, is
            returned as it is.
    """
    if not isinstance(document, Mapping) or document.get("version") != 1:
        return document
    options = document.get("options")
    if isinstance(options, Mapping):
        fields = RuntimeOptions.model_fields
        foreign = any(
            _differs(options[name], fields[name].default)
            for name in RuntimeOptions.profile_fields()
            if name in options
        )
        runtime = {"runtime": _OTHER_RUNTIME} if foreign else {}
        options = grouped_document({**options, **runtime})
    return {**document, "version": 2, "options": options}


def _differs(value: Any, default: Any) -> bool:
    """True if a value of a JSON document, where tuples are lists, is not the default."""
    return bool((tuple(value) if isinstance(value, list) else value) != default)
