"""What an operator can set: environment variables with the prefix AUTOSHARD_."""

from functools import cached_property
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url

from autoshard_solver_cache import default_url

_MIB = 1 << 20


class Settings(BaseSettings):
    """Settings of the service; every one is an environment variable too."""

    model_config = SettingsConfigDict(env_prefix="AUTOSHARD_", extra="forbid", frozen=True)

    store_url: str = Field(
        default_factory=default_url,
        description="Database of jobs, plans and solved blocks, as a SQLAlchemy URL. "
        "`sqlite://` keeps everything in memory, and blocks only as long as a solve. By default "
        "a SQLite file in the user's cache folder.",
    )
    cache_max_bytes: int = Field(
        default=1024 * _MIB,
        gt=0,
        description="Room for cached plans and solved blocks, compressed; the least recently "
        "used go first.",
    )
    cache_max_age: float = Field(
        default=90 * 24 * 3600.0,
        gt=0,
        description="Seconds after which a cached plan or block that nobody used is dropped.",
    )
    num_workers: int = Field(
        default=2, ge=0, le=256, description="Solves that run at once; 0 only queues."
    )
    worker_host: str = Field(
        default="127.0.0.1",
        description="Address on which `autoshard worker` answers `/livez` and `/metrics`.",
    )
    worker_port: int = Field(
        default=0, ge=0, lt=1 << 16, description="Port of the same; 0 opens none."
    )
    executor: Literal["process", "ray"] = Field(
        default="process",
        description="Where solves run: each in a process of this machine, or on a Ray cluster.",
    )
    ray_address: str = Field(
        default="",
        description="Ray cluster, such as `auto` or `ray://head:10001`; one of this machine's "
        "own if left out. Whoever can reach a Ray cluster can run code there.",
    )
    max_queued_jobs: int = Field(
        default=256, ge=1, description="Jobs that may wait; further ones are answered 429."
    )
    max_caller_jobs: int = Field(
        default=64,
        ge=1,
        description="Jobs of one API key that may wait or run; further ones are answered 429.",
    )
    auth: Literal["auto", "required", "off"] = Field(
        default="auto",
        description="Whether callers need an API key. `auto`: on all addresses but loopback.",
    )
    max_body_bytes: int = Field(
        default=64 * _MIB,
        gt=0,
        description="Largest request body, as sent and after decompression; more is answered 413.",
    )
    max_model_bytes: int = Field(
        default=256 * _MIB, gt=0, description="Largest model.json after decompression."
    )
    max_nodes: int = Field(
        default=200_000, gt=0, description="Operator calls in a program, sub-graphs included."
    )
    max_edges: int = Field(
        default=2_000_000, gt=0, description="Uses of values in a program, sub-graphs included."
    )
    max_mesh_axes: int = Field(default=6, ge=1, le=16, description="Axes of a mesh.")
    max_devices: int = Field(default=1 << 20, ge=1, description="Devices of a mesh.")
    max_strategies: int = Field(
        default=20_000_000,
        gt=0,
        description="Strategies of all choices of a problem together, once it is formulated.",
    )
    max_search_meshes: int = Field(
        default=64, ge=1, description="Meshes that one search may plan for."
    )
    max_request_bytes: int = Field(
        default=_MIB,
        gt=0,
        description="Largest JSON that asks for something: a body, or the form part 'request'.",
    )
    max_topologies: int = Field(
        default=1000, ge=0, description="Topologies that may be stored under names."
    )
    max_topology_bytes: int = Field(
        default=_MIB // 4, gt=0, description="Largest JSON of a topology that is stored."
    )
    max_time_limit: float = Field(
        default=3600.0, gt=0, description="Largest time_limit that a request may ask for, seconds."
    )
    max_job_seconds: float = Field(
        default=2 * 3600.0,
        gt=0,
        description="Wall time of a whole job; its process is then stopped and the job fails.",
    )
    max_job_bytes: int = Field(
        default=16 * 1024 * _MIB,
        gt=0,
        description="Resident memory of a job's processes together; with more they are killed "
        "and the job fails.",
    )
    hot_bytes: int = Field(
        default=64 * _MIB,
        ge=0,
        description="Memory for plans that were asked for lately, beside the store.",
    )
    max_wait: float = Field(
        default=60.0, ge=0, description="Cap of `Prefer: wait=N` on POST /v1/plans, seconds."
    )
    retry_after: int = Field(
        default=1, ge=1, description="Seconds that Retry-After suggests between polls of a job."
    )
    lease: float = Field(
        default=30.0,
        gt=1,
        description="Seconds after which a running job without a sign of life is run again.",
    )
    max_attempts: int = Field(
        default=2, ge=1, description="Times that a job is started before it fails for good."
    )
    job_retention: float = Field(
        default=24 * 3600.0, gt=0, description="Seconds for which a finished job is remembered."
    )
    shutdown_grace: float = Field(
        default=10.0,
        ge=0,
        description="Seconds that running solves get to finish on shutdown; "
        "the rest go back to the queue.",
    )

    @property
    def is_in_memory(self) -> bool:
        """Whether the store is in the memory of one process, and no other sees it."""
        url = make_url(self.store_url)
        return url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}

    @property
    def environment(self) -> dict[str, str]:
        """Variables from which a solver process gets the same settings.

        Unlike its arguments, other users of the machine cannot read them: the URL of a
        database may hold a password.
        """
        given = self.model_dump(mode="json")
        return {f"AUTOSHARD_{name.upper()}": str(value) for name, value in given.items()}

    @cached_property
    def archive_limits(self) -> "dict[str, int]":
        """Fields of `autoshard.graph.ArchiveLimits` that these settings bound."""
        return {
            "archive_bytes": self.max_body_bytes,
            "model_bytes": self.max_model_bytes,
            "nodes": self.max_nodes,
        }
