"""The pictures of docs/plan-page.md: the page of Llama-3-8B's plan on 2x4 H100, in Chromium."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from playwright.sync_api import sync_playwright
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import PlanOptions, export_model, make_mesh, make_plan
from autoshard.plan import Plan
from autoshard.report.page import plan_page

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 1140


def llama_plan() -> Plan:
    """The plan of Llama-3-8B with 8 samples of 1,024 tokens."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(8, 1024, dtype=torch.int64)
    graph = export_model(model, (), {"input_ids": ids, "labels": ids, "use_cache": False})
    mesh = make_mesh((2, 4), axes=("dp", "tp"), topology="h100-sxm")
    return make_plan(graph, mesh, PlanOptions(comparisons=True))


def main() -> None:
    """Write the pictures."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "plan.html"
        file.write_text(plan_page(llama_plan()), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=program)
        page = browser.new_page(viewport={"width": WIDTH, "height": 760})
        page.goto(file.as_uri())
        page.locator("main").wait_for()
        page.screenshot(path=PICTURES / "plan_page.png")
        page.locator("#model").screenshot(path=PICTURES / "plan_page_model.png")
        browser.close()


if __name__ == "__main__":
    main()
