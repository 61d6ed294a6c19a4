"""The limits of the service: settings beyond which something is refused, and who reaches them.

Each refusal is counted in `autoshard_limits_reached_total`, by the setting and by what is limited,
so that alerts tell a caller that asks for too much from a service that has too little.
"""

from collections.abc import Mapping
from enum import StrEnum


class Limited(StrEnum):
    """Kinds of limits, by whose use of the service they bound."""

    REQUEST = "request"
    """One request: its size, its time, and what it asks for."""
    CALLER = "caller"
    """All that one key, project or address does at once, or in a day."""
    SERVICE = "service"
    """All callers together: beyond it, those are refused who have done nothing wrong."""
    JOB = "job"
    """The work of one job."""


_BY_KIND: Mapping[Limited, str] = {
    Limited.REQUEST: "max_header_bytes max_headers header_timeout transfer_timeout max_body_bytes "
    "max_model_bytes max_model_values max_compression_ratio max_nodes max_edges max_mesh_axes "
    "max_devices max_search_meshes max_request_bytes max_request_values max_topology_bytes "
    "max_time_limit max_parse_seconds max_parse_bytes max_config_layers max_config_count "
    "max_config_number max_export_seconds max_export_bytes",
    Limited.CALLER: "max_caller_jobs max_project_jobs max_caller_job_bytes max_project_records "
    "max_caller_streams max_caller_waits max_address_connections max_invalid_keys "
    "max_project_parses max_project_parse_bytes max_topologies",
    Limited.SERVICE: "max_queued_jobs max_waits max_connections max_bodies_bytes max_parses",
    Limited.JOB: "max_strategies max_job_seconds max_job_bytes",
}

LIMITS: Mapping[str, Limited] = {
    setting: kind for kind, settings in _BY_KIND.items() for setting in settings.split()
}
"""Kind of each limit, by its setting."""

REFUSING_NOTHING = frozenset(
    {
        "cache_max_bytes",  # the least recently used entries are evicted
        "project_max_bytes",
        "cache_max_age",
        "idle_timeout",  # ends a connection that has no request
        "max_wait",  # a longer wait is shortened to it
        "max_attempts",  # the job fails with the problem of its last start
    }
)
"""Other settings with such names."""


def limit_name(setting: str) -> str:
    """The name of a limit in problems and metrics: its environment variable."""
    return f"AUTOSHARD_{setting.upper()}"


KINDS_BY_NAME: Mapping[str, Limited] = {limit_name(name): kind for name, kind in LIMITS.items()}
"""The same as `LIMITS`, by the names in problems."""
