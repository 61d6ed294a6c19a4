"""Settings of the service: environment variables with the prefix AUTOSHARD_."""

import ipaddress
import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from autoshard.base.quantities import ByteCount
from autoshard_solver_cache import default_url

PREFIX = "AUTOSHARD_"
"""Of the variables."""

_MIB = 1 << 20


class Settings(BaseSettings):
    """Settings of the service, each also an environment variable."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    store_url: str = Field(
        default_factory=default_url,
        description="Database of jobs, plans and solved blocks, as a SQLAlchemy URL. "
        "`sqlite://` keeps everything in memory, and blocks only as long as a solve. By default "
        "a SQLite file in the user's cache folder.",
    )
    cache_max_bytes: ByteCount = Field(
        default=1024 * _MIB,
        description="Budget for cached plans and solved blocks, compressed; the least recently "
        "used are evicted first.",
    )
    project_max_bytes: ByteCount | None = Field(
        default=None,
        description="Budget of each project within that of the cache; without one, the projects "
        "that use more than an equal share lose entries first.",
    )
    cache_max_age: float = Field(
        default=90 * 24 * 3600.0,
        gt=0,
        description="Seconds after which an unused plan or block is evicted.",
    )
    num_workers: int = Field(
        default=2,
        ge=0,
        le=256,
        description="Concurrent solves; with 0, jobs are queued for `autoshard worker`.",
    )
    num_quick_workers: int = Field(
        default=1,
        ge=0,
        le=256,
        description="Further workers for validations, coverage and explanations only, so that "
        "these do not wait for solves.",
    )
    num_reserve_workers: int = Field(
        default=1,
        ge=0,
        le=256,
        description="Further workers for projects of which no job runs, while all others have a "
        "job, so that these projects do not wait for the jobs of others.",
    )
    project_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={},
        description='Shares of the workers by project, such as `{"research": 3}`; 1 for others.',
    )
    worker_host: str = Field(
        default="127.0.0.1",
        description="Address of `/livez` and `/metrics` of `autoshard worker`.",
    )
    worker_port: int = Field(
        default=0,
        ge=0,
        lt=1 << 16,
        description="Port of `/livez` and `/metrics` of `autoshard worker`; 0 for none.",
    )
    executor: Literal["process", "ray"] = Field(
        default="process",
        description="Run each solve in a process of this machine, or on a Ray cluster.",
    )
    ray_address: str = Field(
        default="",
        description="Ray cluster, such as `auto` or `ray://head:10001`; one on this machine if "
        "left out. Everyone who can reach a Ray cluster can run code there.",
    )
    max_queued_jobs: int = Field(
        default=2000, ge=1, description="Largest number of queued jobs; status 429 beyond it."
    )
    max_caller_jobs: int = Field(
        default=64,
        ge=1,
        description="Largest number of queued and running jobs of one API key; status 429 beyond "
        "it.",
    )
    max_project_jobs: int = Field(
        default=1000,
        ge=1,
        description="Largest number of queued and running jobs of one project; status 429 beyond "
        "it.",
    )
    max_caller_job_bytes: ByteCount = Field(
        default=1024 * _MIB,
        description="Largest number of bytes in the jobs of one API key, or of all callers without "
        "keys: requests and graphs of unfinished jobs, and results that are not cached because "
        "time ran out; status 429 beyond it.",
    )
    max_project_records: int = Field(
        default=100_000,
        ge=1,
        description="Largest number of jobs submitted or cancelled, and of graphs, topologies and "
        "plans stored or deleted, of one project within a day; status 429 beyond it.",
    )
    max_caller_streams: int = Field(
        default=200,
        ge=1,
        description="Largest number of event streams that one API key, or all callers without "
        "keys, have open at one server; status 429 beyond it.",
    )
    max_caller_waits: int = Field(
        default=256,
        ge=1,
        description="Largest number of requests that one API key, or all callers without keys, "
        "have waiting for jobs at one server (`Prefer: wait=N`); status 429 beyond it.",
    )
    max_waits: int = Field(
        default=1024,
        ge=1,
        description="The same for all callers together.",
    )
    auth: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="Require an API key: always, never, or (`auto`) on all addresses but loopback.",
    )
    max_connections: int = Field(
        default=2048,
        ge=1,
        description="Open connections, at most what `ulimit -n` allows. Beyond it the one that "
        "has waited longest for a request is closed; if all have requests, status 503. `/livez` "
        "is answered in any case.",
    )
    max_address_connections: int = Field(
        default=256,
        ge=1,
        description="Open connections of one address other than this machine's; status 503 "
        "beyond it. Behind a reverse proxy on another host, as many as all callers need.",
    )
    max_header_bytes: ByteCount = Field(
        default=32 * 1024,
        description="Largest request line and headers together; status 431 beyond it.",
    )
    max_headers: int = Field(
        default=100, ge=1, description="Headers of a request; status 431 beyond it."
    )
    header_timeout: float = Field(
        default=10.0,
        gt=0,
        description="Seconds from the connection, or the first byte of a later request, to the "
        "end of the header; status 408 beyond it.",
    )
    transfer_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds in which another 16 KiB of a body must arrive, or all of it; status "
        "408 beyond it. A caller that reads nothing of a response for so long is disconnected.",
    )
    idle_timeout: float = Field(
        default=60.0,
        gt=0,
        description="Seconds after which a connection without a request is closed.",
    )
    max_invalid_keys: int = Field(
        default=30,
        ge=1,
        description="Invalid API keys of one address in a minute; status 429 beyond it.",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path under which a reverse proxy publishes the service, such as `/plan`.",
    )
    forwarded_allow_ips: str = Field(
        default="127.0.0.1,::1",
        description="Addresses and networks of the reverse proxies whose `X-Forwarded-For` and "
        "`X-Forwarded-Proto` are used, with commas between them; `*` for all.",
    )
    cors_origins: str = Field(
        default="",
        description="Origins of web pages that may send requests from a browser, such as "
        "`https://ml.example.com`, with commas between them; `*` for all; none by default.",
    )
    max_body_bytes: ByteCount = Field(
        default=64 * _MIB,
        description="Largest request body, as sent and after decompression; status 413 beyond it.",
    )
    max_model_bytes: ByteCount = Field(
        default=256 * _MIB, description="Largest model.json after decompression."
    )
    max_model_values: int = Field(
        default=2_500_000,
        gt=0,
        description="JSON values of a model.json; Llama-3-70B has 380,000.",
    )
    max_compression_ratio: float = Field(
        default=200.0,
        ge=1,
        allow_inf_nan=False,
        description="Largest decompressed size of a request body, or of a file of an archive, by "
        "its compressed size; Llama-3-70B has 98. It applies beyond the first 1 MiB of a body.",
    )
    max_bodies_bytes: ByteCount = Field(
        default=256 * _MIB,
        description="Memory for the bodies of all requests together, decompressed, beyond the "
        "first 64 KiB of each; status 503 beyond it.",
    )
    num_parsers: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Graphs and plans read at once, each in a process of its own; one more is read "
        "for a project of which nothing is being read.",
    )
    max_project_parses: int = Field(
        default=32,
        ge=1,
        description="Graphs and plans of one project that are read, or wait to be read, at the "
        "same time; status 429 beyond it.",
    )
    max_project_parse_bytes: ByteCount = Field(
        default=128 * _MIB,
        description="Bytes of these graphs and plans; status 429 beyond it.",
    )
    max_parses: int = Field(
        default=256,
        ge=1,
        description="Graphs and plans of all projects that wait to be read; status 429 beyond it.",
    )
    max_parse_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Largest time to read a graph, or to compare or export a plan; beyond it, the "
        "process is stopped, and the status is 422.",
    )
    max_parse_bytes: ByteCount = Field(
        default=512 * _MIB,
        description="Largest resident memory of such a process; beyond it, the same.",
    )
    num_exporters: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Models of configs that are built and exported at once, each in a process of "
        "its own; one more for a project of which none is built. Those that wait have the limits "
        "of graphs that wait.",
    )
    max_config_layers: int = Field(
        default=512,
        ge=1,
        description="Layers of a config: its numbers whose names end in layers, blocks or depth.",
    )
    max_config_count: int = Field(
        default=1 << 16,
        ge=1,
        description="Largest other number of a config whose name starts with num, such as heads, "
        "experts or labels.",
    )
    max_config_number: int = Field(
        default=1 << 24,
        ge=1,
        description="Largest other integer of a config, such as hidden_size or vocab_size, but for "
        "the base of rotary positions.",
    )
    max_export_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Largest time to build and export the model of a config; beyond it, the "
        "process is stopped, and the status is 422.",
    )
    max_export_bytes: ByteCount = Field(
        default=4096 * _MIB,
        description="Largest resident memory of such a process; beyond it, the same.",
    )
    max_nodes: int = Field(
        default=200_000, gt=0, description="Operator calls in a program, including sub-graphs."
    )
    max_edges: int = Field(
        default=2_000_000, gt=0, description="Uses of values in a program, including sub-graphs."
    )
    max_mesh_axes: int = Field(default=6, ge=1, le=16, description="Axes of a mesh.")
    max_devices: int = Field(default=1 << 20, ge=1, description="Devices of a mesh.")
    max_strategies: int = Field(
        default=20_000_000,
        gt=0,
        description="Strategies of all nodes of a problem together.",
    )
    max_search_meshes: int = Field(default=64, ge=1, description="Meshes of one search.")
    max_request_bytes: ByteCount = Field(
        default=_MIB,
        description="Largest JSON of a request: a body, or the form part 'request'.",
    )
    max_request_values: int = Field(
        default=100_000,
        gt=0,
        description="Values of the JSON of a request, counted by its separators.",
    )
    max_topologies: int = Field(default=1000, ge=0, description="Topologies stored under names.")
    max_topology_bytes: ByteCount = Field(
        default=_MIB // 4, description="Largest JSON of a stored topology."
    )
    solvers: str = Field(
        default="autoshard,ilp",
        description="Solvers that the option `solver` may name, with commas between them; status "
        "422 for others. Those other than `autoshard` and `ilp` must be installed with cvxpy.",
    )
    max_time_limit: float = Field(
        default=3600.0, gt=0, description="Largest time_limit of a request, seconds."
    )
    max_job_seconds: float = Field(
        default=2 * 3600.0,
        gt=0,
        description="Largest wall time of a job; beyond it, its process is stopped and it fails.",
    )
    max_job_bytes: ByteCount = Field(
        default=16 * 1024 * _MIB,
        description="Largest resident memory of all processes of a job; beyond it, they are killed "
        "and the job fails.",
    )
    memory_cache_bytes: int = Field(
        default=64 * _MIB,
        ge=0,
        description="Memory of the service's process for recently used plans.",
    )
    max_wait: float = Field(
        default=60.0, ge=0, description="Largest N of `Prefer: wait=N`, seconds."
    )
    retry_after: int = Field(
        default=1, ge=1, description="Retry-After of an unfinished job, seconds."
    )
    lease: float = Field(
        default=30.0,
        gt=1,
        description="Seconds without a heartbeat after which a running job is requeued.",
    )
    max_attempts: int = Field(
        default=2, ge=1, description="Number of starts of a job after which it fails."
    )
    job_retention: float = Field(
        default=24 * 3600.0, gt=0, description="Seconds after which a finished job is deleted."
    )
    audit_retention: float = Field(
        default=90 * 24 * 3600.0,
        gt=0,
        description="Seconds after which an event of the audit log is deleted.",
    )
    shutdown_delay: float = Field(
        default=2.0,
        ge=0,
        description="Seconds after SIGTERM in which `/readyz` is 503 and requests are served as "
        "before; longer than a load balancer needs to see that. Then no connection is accepted.",
    )
    shutdown_grace: float = Field(
        default=10.0,
        ge=0,
        description="Seconds for running solves to finish on shutdown; then they are requeued.",
    )

    @field_validator("store_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        try:
            make_url(value)
        except ArgumentError:
            raise ValueError(
                "give a SQLAlchemy URL, such as sqlite:////var/lib/autoshard/store.sqlite3 or "
                "postgresql+psycopg://user@host/autoshard"
            ) from None
        return value

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _check_addresses(cls, value: str) -> str:
        if value != "*":
            for address in _listed(value):
                ipaddress.ip_network(address)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        for origin in _listed(value):
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin, such as https://ml.example.com")
        return value

    @property
    def allowed_origins(self) -> list[str]:
        """Origins of pages that may send requests from a browser."""
        return _listed(self.cors_origins)

    @property
    def allowed_solvers(self) -> list[str]:
        """Names of the solvers that requests may ask for."""
        return _listed(self.solvers)

    @property
    def is_in_memory(self) -> bool:
        """True if the database is in the memory of this process."""
        url = make_url(self.store_url)
        return url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the settings to a solver process.

        Other users of the machine could read its arguments, but not these, and the URL of a
        database may contain a password.
        """
        values = self.model_dump(mode="json")
        return {
            f"{PREFIX}{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
            if value is not None
        }

    @cached_property
    def archive_limits(self) -> dict[str, Any]:
        """Fields of `autoshard.graph.ArchiveLimits` that jobs of all releases have."""
        return {
            "archive_bytes": self.max_body_bytes,
            "model_bytes": self.max_model_bytes,
            "nodes": self.max_nodes,
            "compression_ratio": self.max_compression_ratio,
        }


def _listed(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",") if entry.strip()]
