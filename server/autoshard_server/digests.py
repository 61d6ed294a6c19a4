"""Digests of requests, which are keys of the cache."""

import hashlib
import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autoshard.graph import RULES_VERSION
from autoshard.plan import PLAN_VERSION
from autoshard.planner import torch_version


def digest(*parts: Any) -> str:
    """The digest of values that JSON can express, 64 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def versions() -> tuple[Any, ...]:
    """Versions that results depend on."""
    return *_installed_versions(), PLAN_VERSION, RULES_VERSION


@cache
def transformers_version() -> str | None:
    """The installed version of transformers; None if a package that exports is missing."""
    try:
        return version("spmd_types") and version("torch") and version("transformers")
    except PackageNotFoundError:
        return None


@cache
def _installed_versions() -> tuple[str, str | None]:
    # Memoised: reading them takes longer than the rest of a request whose result is cached.
    return version("autoshard"), torch_version()
