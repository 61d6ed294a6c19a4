"""Generated files are current."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from autoshard import errors
from autoshard_server.generate import FILES, settings_page, specification_text
from autoshard_server.http.specification import JOB_PROBLEMS
from autoshard_server.problems import (
    EXCEPTION_PROBLEMS,
    PROBLEM_MEDIA_TYPE,
    ProblemType,
    problem_type_of,
)
from autoshard_server.settings import Settings
from autoshard_solver_cache import StoreFullError, StoreUnavailableError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def specification() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(specification_text())
    return made


def operations(specification: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in specification["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_committed_files_are_those_of_the_code(name: str) -> None:
    committed = (ROOT / name).read_text()
    assert committed == FILES[name](), "run `python -m autoshard_server.generate`"


def test_every_operation_has_an_id_of_its_own(specification: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(specification)]
    assert len(set(ids)) == len(ids)


@pytest.mark.thorough
def test_every_error_answer_is_a_problem_with_an_example(specification: dict[str, Any]) -> None:
    problem = {**specification["components"]["schemas"]["Problem"], **specification}
    for method, path, operation in operations(specification):
        for status, answer in operation["responses"].items():
            if int(status) < 400 or method == "head":
                continue
            assert list(answer["content"]) == ["application/problem+json"], (method, path)
            examples = answer["content"]["application/problem+json"]["examples"]
            assert examples
            for example in examples.values():
                jsonschema.validate(example["value"], problem)
                assert example["value"]["status"] == int(status)


def test_every_json_body_has_an_example_of_its_schema(specification: dict[str, Any]) -> None:
    for method, path, operation in operations(specification):
        answers = [answer for status, answer in operation["responses"].items() if status < "300"]
        for body in (operation.get("requestBody", {}), *answers):
            content = body.get("content", {}).get("application/json", {})
            if "$ref" in json.dumps(content.get("schema")):
                assert "example" in content, (method, path)
                jsonschema.validate(content["example"], {**specification, **content["schema"]})


def test_every_part_of_a_path_has_an_example(specification: dict[str, Any]) -> None:
    for method, path, operation in operations(specification):
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                assert "example" in parameter, (method, path)
                jsonschema.validate(parameter["example"], parameter["schema"])


def test_every_page_has_links(specification: dict[str, Any]) -> None:
    pages = [
        operation["responses"]["200"]
        for _, _, operation in operations(specification)
        if "page_token" in {parameter["name"] for parameter in operation.get("parameters", ())}
    ]
    assert len(pages) >= 2
    assert all("Link" in page["headers"] for page in pages)


def test_event_streams_are_described_by_the_model_of_events(specification: dict[str, Any]) -> None:
    text = json.dumps(specification)
    assert "itemSchema" not in text  # a keyword of OpenAPI 3.2
    stream = specification["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]
    assert "JobEvent" in stream["description"]
    *_, data = stream["content"]["text/event-stream"]["example"].strip().partition("data: ")
    event = specification["components"]["schemas"]["JobEvent"]
    jsonschema.validate(json.loads(data), {**specification, **event})


def test_every_tag_is_described(specification: dict[str, Any]) -> None:
    described = {tag["name"]: tag["description"] for tag in specification["tags"]}
    used = {tag for _, _, operation in operations(specification) for tag in operation["tags"]}
    assert used == set(described)
    assert all(described.values())


def test_who_answers_with_a_job_says_what_can_go_wrong_in_it(specification: dict[str, Any]) -> None:
    expected = {kind.slug for kind in JOB_PROBLEMS}
    assert "other-release" in expected
    everything = [operation["responses"] for _, _, operation in operations(specification)]
    makers = [answers for answers in everything if "202" in answers]
    assert len(makers) == 5
    for answers in makers:
        listed = {
            slug
            for answer in answers.values()
            for slug in answer["content"].get(PROBLEM_MEDIA_TYPE, {}).get("examples", ())
        }
        assert expected <= listed
    job = specification["paths"]["/v1/jobs/{job_id}"]["get"]["responses"]
    assert "other-release" in job["409"]["content"][PROBLEM_MEDIA_TYPE]["examples"]


def test_every_reference_leads_somewhere(specification: dict[str, Any]) -> None:
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(specification))
    assert names
    assert set(names) <= set(specification["components"]["schemas"])


def test_every_setting_is_explained() -> None:
    page = settings_page()
    for name, field in Settings.model_fields.items():
        assert field.description
        assert f"`AUTOSHARD_{name.upper()}`" in page


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_NUM_WORKERS", "7")
    monkeypatch.setenv("AUTOSHARD_STORE_URL", "sqlite://")
    assert Settings().num_workers == 7
    assert Settings().store_url == "sqlite://"


def test_problem_names_are_unique() -> None:
    slugs = [kind.slug for kind in ProblemType]
    assert len(set(slugs)) == len(slugs)
    assert all(re.fullmatch(r"[a-z-]+", slug) for slug in slugs)


def test_every_input_error_is_the_callers() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    inputs = [kind for kind in kinds if issubclass(kind, errors.InputError)]
    of_store = {StoreFullError, StoreUnavailableError}
    assert set(EXCEPTION_PROBLEMS) <= {*inputs, *of_store}
    for kind in inputs:
        assert 400 <= problem_type_of(kind("message")).status < 500


def test_anything_else_is_a_bug() -> None:
    assert problem_type_of(RuntimeError("x")).slug == "internal"
    assert problem_type_of(ValueError("x")).slug == "internal"
