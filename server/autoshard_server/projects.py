"""Projects, which keep the resources of one team apart from those of the others.

Plans, graphs, jobs, topologies, solved blocks and Idempotency-Keys belong to a project, and so does
every API key. A caller sees and changes only those of its project, and reads the topologies of
the project `shared`.
"""

import re

DEFAULT_PROJECT = "default"
"""The project of keys that name none, and of every caller without a key."""

SHARED_PROJECT = "shared"
"""The project whose topologies all others may read."""

MAX_PROJECT_NAME = 32
"""Characters of a name."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")

_SEPARATOR = "_"
"""Between project and namespace; neither contains it."""


def is_project_name(name: str) -> bool:
    """True if a project may have this name: lower-case letters, digits, and hyphens inside."""
    return len(name) <= MAX_PROJECT_NAME and _NAME.fullmatch(name) is not None


def stored_namespace(project: str, namespace: str) -> str:
    """The namespace of the cache that has a project's entries of a namespace."""
    if project == DEFAULT_PROJECT:
        return namespace
    return f"{project}{_SEPARATOR}{namespace}"


def project_of(stored: str) -> str:
    """The project of a namespace of the cache."""
    return split_namespace(stored)[0]


def split_namespace(stored: str) -> tuple[str, str]:
    """The project and the namespace of a namespace of the cache."""
    project, separator, namespace = stored.partition(_SEPARATOR)
    return (project, namespace) if separator else (DEFAULT_PROJECT, stored)
