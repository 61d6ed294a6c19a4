"""`python -m autoshard_server`: serve on the address that two flags give."""

import argparse

from autoshard_server.serve import serve


def main() -> None:
    """Parse the command line, and serve."""
    parser = argparse.ArgumentParser(
        prog="python -m autoshard_server",
        description="Planning service; AUTOSHARD_* variables set everything else.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default=8000, type=int, help="0 takes a free one")
    parser.add_argument("--store-url", help="database of plans and jobs, a SQLAlchemy URL")
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", default="info", choices=levels, help="least to log")
    parser.add_argument(
        "--auth",
        action=argparse.BooleanOptionalAction,
        help="whether callers need an API key; on every address but loopback",
    )
    given = parser.parse_args()
    serve(
        host=given.host,
        port=given.port,
        cache_url=given.store_url,
        log_level=given.log_level,
        auth=given.auth,
    )


if __name__ == "__main__":
    main()
