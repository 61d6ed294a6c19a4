"""The page in a real browser: its figures are those of the plan, and everybody can use it."""

import json
import math
import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic_core import to_jsonable_python
from support.meshes import slow_devices
from support.models import Planner, llama, small_graph

from autoshard.exports import code_exports
from autoshard.layouts import Layout
from autoshard.plan import Plan
from autoshard.planner import explain
from autoshard.report.answer import answer_of
from autoshard.report.page import plan_page
from autoshard.report.page.content import page_report
from autoshard.report.page.scripts import page_files

PHONE = 390
TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(scope="module")
def plan(planned: Planner) -> Plan:
    return planned(small_graph(llama), (2, 2), comparisons=True)


@pytest.fixture(scope="module")
def pipeline(planned: Planner) -> Plan:
    return planned(small_graph(llama), slow_devices(pp=2, dp=2), stages=2, micro_batches=4)


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of a plan from a file; it may load nothing, and log nothing."""
    wrong: list[str] = []

    def open_page(text: str, *, scheme: Any = "light", width: int = 1200) -> Page:
        path = tmp_path / "plan.html"
        path.write_text(text, encoding="utf-8")
        view = {"width": width, "height": 900}
        page = browser.new_page(color_scheme=scheme, viewport=view, bypass_csp=False)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        requests: list[str] = []
        page.goto(path.as_uri())
        expect(page.locator("h1")).to_be_visible()
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
        return page

    yield open_page
    assert wrong == []


@contextmanager
def module(browser: Browser, name: str) -> Iterator[Callable[[str, object], Any]]:
    """Runs expressions with a module of the page as `m`, and an argument as `given`."""
    code = (page_files() / name).read_bytes()
    url = f"data:text/javascript;base64,{b64encode(code).decode()}"
    page = browser.new_page()

    def evaluate(expression: str, given: object) -> Any:
        program = f"async ([url, given]) => {{ const m = await import(url); return {expression}; }}"
        return page.evaluate(program, [url, given])

    yield evaluate
    page.close()


def test_slices_are_those_of_the_library(browser: Browser) -> None:
    seeded, cases = random.Random(0), []
    texts = ("S(0),R", "S(0),S(1)", "S(1),S(1)", "S(0),S(0);1>0", "I,S(0)/1+1+2", "S(1),I", "P,R")
    for text in texts:
        layout, sizes = Layout.parse(text), (2, 3)
        shape = [48, 24] if "/" in text or ">" in text else [seeded.choice([6, 12, 48]), 36]
        for device in range(6):
            at = [device // 3, device % 3]
            slices = layout.local_slices(shape, sizes, at)
            expected = [[[part.start, part.stop] for part in dim] for dim in slices]
            cases.append((shape, text, [*sizes], at, expected))
    uneven = Layout.parse("S(0)").local_slices([7], (3,), [2])
    cases.append(([7], "S(0)", [3], [2], [[[part.start, part.stop] for part in uneven[0]]]))
    with module(browser, "layouts.js") as evaluate:
        found = evaluate(
            "given.map(([shape, text, sizes, at]) =>"
            " m.localSlices(shape, m.parseLayout(text), sizes, at))",
            cases,
        )
    assert found == [case[-1] for case in cases]


@pytest.mark.parametrize("kind", ["plan", "pipeline"])
def test_totals_of_the_tree_are_those_of_the_plan(
    browser: Browser, kind: str, request: pytest.FixtureRequest
) -> None:
    made: Plan = request.getfixturevalue(kind)
    given = [json.loads(made.to_json()), json.loads(page_report(made).to_json())]
    with module(browser, "modules.js") as evaluate:
        totals = evaluate("m.moduleTree(...given).totals", given)
    stages = made.stages
    inside = math.fsum(node.communication for stage in stages for node in stage.nodes)
    moved = math.fsum(r.time for stage in stages for r in stage.reshardings)
    assert totals["compute"] == pytest.approx(sum(n.time for s in stages for n in s.nodes))
    assert totals["communication"] == pytest.approx(inside + moved)
    memories = [made.memory] if made.pipeline is None else [s.memory for s in made.pipeline.stages]
    assert totals["parameterBytes"] == sum(m.parameters for m in memories if m is not None)


def test_views_of_a_plan(opened: Callable[..., Page], plan: Plan) -> None:
    page = opened(plan_page(plan, exports=code_exports(plan)))
    titles = page.locator("h2").all_inner_texts()
    assert titles == [
        *("Verdict", "Memory", "The model", "The mesh", "Why this?", "The step", "Take away"),
    ]
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text(plan.certificate_statement)
    rows = verdict.locator("table").first.locator("tbody th").all_inner_texts()
    assert rows == [row.name for row in answer_of(plan).layouts]
    assert len(rows) > 1
    # Both layers are alike, and have one row.
    tree = page.locator("table.tree")
    expect(tree.get_by_role("button", name="0 to 1")).to_be_visible()
    expect(tree).to_contain_text(f"{TIMES} 2")


def test_the_tree_opens_by_keyboard_down_to_operators(
    opened: Callable[..., Page], plan: Plan
) -> None:
    page = opened(plan_page(plan))
    tree = page.locator("table.tree")
    for name in ("0 to 1", "mlp", "gate_proj"):
        tree.get_by_role("button", name=name, exact=True).press("Enter")
    own = tree.get_by_role("button", name="1 operator, 1 parameter")
    own.press("Enter")
    expect(own).to_have_attribute("aria-expanded", "true")
    name = "model.layers.0.mlp.gate_proj.weight"
    placed = next(i for s in plan.stages for i in s.parameters if i.target == name)
    row = tree.locator("tr", has=page.locator("code", has_text=name)).last
    expect(row).to_contain_text(f" {TIMES} ".join(map(str, placed.local_shape)))


def test_devices_and_their_slices(opened: Callable[..., Page], plan: Plan) -> None:
    page = opened(plan_page(plan))
    mesh = page.locator("#mesh")
    mesh.get_by_role("radio", name="axis0").check()
    mesh.get_by_role("button", name="3").click()
    expect(mesh).to_contain_text("Its group on axis0: devices 1, 3.")
    name = "model.layers.1.self_attn.q_proj.weight"
    mesh.get_by_role("combobox").select_option(label=name)
    placed = next(i for s in plan.stages for i in s.parameters if i.target == name)
    slices = Layout.parse(placed.layout).local_slices(placed.shape, (2, 2), (1, 1))
    lit = mesh.locator("rect.cell.lit title").text_content()
    assert lit is not None
    assert "3" in lit
    texts = mesh.locator("svg.tensor .tick").all_text_contents()
    for dim, parts in enumerate(slices):
        if parts[0].stop - parts[0].start < placed.shape[dim]:
            assert f"{parts[0].start}:{parts[0].stop}" in texts


def test_why_has_collectives_alternatives_and_the_command(
    opened: Callable[..., Page], plan: Plan
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    explanation = explain(None, plan, name)
    given = [to_jsonable_python(explanation)]
    page = opened(plan_page(plan, explanations=given, source="my plan.json"))
    why = page.locator("#why")
    # What the page can explain is shown first.
    expect(why.get_by_role("combobox")).to_have_value(name)
    expect(why).to_contain_text(f"autoshard explain 'my plan.json' {name}")
    value = next(i.name for i in plan.stages[0].parameters if i.target == name)
    moved = [r for r in plan.stages[0].reshardings if r.value == value]
    alternatives = explanation.alternatives
    expect(why.locator("tbody tr")).to_have_count(len(moved) + len(alternatives))
    chosen = next(found for found in alternatives if found.chosen)
    expect(why.locator("tr", has_text="chosen")).to_contain_text(chosen.layouts)
    why.get_by_role("combobox").fill("no such thing")
    expect(why).to_contain_text("The plan has nothing of that name.")


def test_the_step_is_walked_by_arrow_keys(opened: Callable[..., Page], plan: Plan) -> None:
    page = opened(plan_page(plan))
    timeline = page.locator("#step canvas")
    timeline.press("ArrowRight")
    first = page.locator("#step figcaption").inner_text()
    timeline.press("ArrowRight")
    expect(page.locator("#step figcaption")).not_to_have_text(first)
    assert first.startswith("compute: ")
    timeline.press("+")
    drawn = timeline.evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert drawn > 10


def test_all_stages_of_a_pipeline(opened: Callable[..., Page], pipeline: Plan) -> None:
    page = opened(plan_page(pipeline))
    step = page.locator("#step")
    assert pipeline.pipeline is not None
    expect(step).to_contain_text(f"{pipeline.pipeline.schedule}: 2 stages on 2 pipeline ranks")
    expect(step.locator("tbody tr")).to_have_count(2)
    step.locator("canvas").press("ArrowRight")
    expect(step.locator("figcaption")).to_contain_text("rank 0: stage 0, forward of micro-batch 0")


def test_the_difference_of_two_plans(
    opened: Callable[..., Page], plan: Plan, planned: Planner
) -> None:
    other = planned(small_graph(llama), (2, 2), algo="ddp")
    page = opened(plan_page(plan, other=other))
    difference = page.locator("#difference")
    assert plan.costs is not None
    assert other.costs is not None
    word = "faster" if plan.costs.total < other.costs.total else "slower"
    expect(difference).to_contain_text(f"a step {word} than the other one")


def test_a_document_without_a_plan_says_why(opened: Callable[..., Page], plan: Plan) -> None:
    lines = {"reason": "the memory is too small", "stages": (), "costs": None, "memory": None}
    made = plan.model_copy(update=lines)
    expect(opened(plan_page(made)).locator("#page")).to_contain_text(made.reason)


@pytest.mark.parametrize(
    ("kind", "scheme", "width"),
    [("plan", "light", 1200), ("plan", "dark", PHONE), ("pipeline", "dark", 1200)],
)
def test_everybody_can_use_it(
    opened: Callable[..., Page],
    axe: str,
    *,
    kind: str,
    scheme: str,
    width: int,
    request: pytest.FixtureRequest,
) -> None:
    made: Plan = request.getfixturevalue(kind)
    page = opened(plan_page(made, exports=code_exports(made)), scheme=scheme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for button in page.locator("table.tree button[aria-expanded=false]").all()[:3]:
        button.press("Enter")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in serious] == []


def test_only_the_script_of_the_page_runs(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    text = plan_page(plan).replace("<body>", "<body><script>document.title = 'no'</script>")
    path.write_text(text, encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    expect(page.locator("h1")).to_be_visible()
    assert page.title() != "no"
