"""Pages for browsers: the documentation of the API, and the kinds of problems."""

import re
from typing import Any
from urllib.parse import urljoin

import pytest

from autoshard_server.problems import ProblemType


def policy(answer: Any) -> dict[str, str]:
    """The sources that a page allows, by kind."""
    parts = answer.headers["content-security-policy"].split("; ")
    return {kind: sources for kind, _, sources in (part.partition(" ") for part in parts)}


def test_the_documentation_needs_only_this_service(service: Any) -> None:
    page = service.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    allowed = policy(page)
    assert allowed["default-src"] == "'none'"
    assert {source for sources in allowed.values() for source in sources.split()} == {
        "'none'",
        "'self'",
        "data:",
    }
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 4
    for link in links:
        file = service.http.get(urljoin("/docs", link))
        assert file.status_code == 200, link
        assert file.headers["x-content-type-options"] == "nosniff"
        assert file.content
    start = service.http.get("/docs/start.js")
    assert start.headers["content-type"].startswith("text/javascript")
    (specification,) = re.findall(r'url: "([^"]+)"', start.text)
    assert "openapi" in service.http.get(urljoin("/docs", specification)).json()


def test_the_page_has_no_script_or_style_of_its_own(service: Any) -> None:
    text = service.http.get("/docs").text
    assert not re.search(r"<script>|<style|\bstyle=|\bon\w+=", text)


@pytest.mark.parametrize("path", ["/docs/index.html", "/docs/../problems.py", "/redoc"])
def test_other_files_are_not_found(service: Any, path: str) -> None:
    answer = service.http.get(path.replace("..", "%2e%2e"))
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems#not-found")


def test_a_problem_leads_to_its_description(service: Any) -> None:
    problem = service.http.get(f"/v1/plans/{0:064}").json()
    address, _, slug = urljoin("/v1/plans/0", problem["type"]).partition("#")
    page = service.http.get(address)
    assert (page.status_code, slug) == (200, "not-found")
    assert set(policy(page).values()) == {"'none'"}
    for kind in ProblemType:
        section = page.text.split(f'<h2 id="{kind.slug}">')[1].split("<h2")[0]
        assert str(kind.status) in section
    assert "<script" not in page.text
