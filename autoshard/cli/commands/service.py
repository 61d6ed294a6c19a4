"""Commands of the planning service: serve, worker, demo."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from autoshard.base.extras import from_extra
from autoshard.cli.rendering.numbers import count
from autoshard.cli.rendering.output import console

_MAX_PORT = 65535

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level that is logged.")
]


def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=_MAX_PORT, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    uds: Annotated[
        str | None, typer.Option(help="Path of a Unix socket to listen on, instead of --host.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate and its chain (PEM), to serve https.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of --tls-cert (PEM), if not in that file.")
    ] = None,
    root_path: Annotated[
        str | None,
        typer.Option(
            help="Path under which a reverse proxy publishes the service, such as /plan; default "
            "AUTOSHARD_ROOT_PATH."
        ),
    ] = None,
    forwarded_allow_ips: Annotated[
        str | None,
        typer.Option(
            help="Addresses and networks of the reverse proxies whose X-Forwarded-For and "
            "X-Forwarded-Proto are used; default AUTOSHARD_FORWARDED_ALLOW_IPS, or loopback."
        ),
    ] = None,
    auth: Annotated[
        bool | None,
        typer.Option(
            help="Require an API key of `autoshard keys`; default: on every address but loopback."
        ),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Start the planning service."""
    with from_extra("server"):
        from autoshard_server.serve import serve as run  # noqa: PLC0415  an extra

    run(
        host=host,
        port=port,
        uds=uds,
        tls_cert=tls_cert,
        tls_key=tls_key,
        root_path=root_path,
        forwarded_allow_ips=forwarded_allow_ips,
        auth=auth,
        log_level=log_level,
    )


def worker(
    *,
    store: Annotated[
        str | None,
        typer.Option(
            help="Database of the service, as a SQLAlchemy URL; better in AUTOSHARD_STORE_URL, "
            "where other users cannot read it."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        count(help="Number of jobs that run at once; default AUTOSHARD_NUM_WORKERS."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address for --port; default AUTOSHARD_WORKER_HOST, or 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_MAX_PORT,
            help="Serve /livez and /metrics on this port; default AUTOSHARD_WORKER_PORT, or none.",
        ),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Run jobs of a service on this host too; after SIGTERM, running jobs may finish in time."""
    with from_extra("server"):
        from autoshard_server.serve import run_workers  # noqa: PLC0415  an extra

    run_workers(store_url=store, num_workers=workers, host=host, port=port, log_level=log_level)


def demo() -> None:
    """Plan GPT-2 through the service, then run a small one sharded on 4 ranks."""
    from autoshard.cli.commands.demo import run_demo  # noqa: PLC0415  it needs transformers

    run_demo(console)
