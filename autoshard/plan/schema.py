"""JSON schema of a plan: `python -m autoshard.plan.schema` writes `plan.schema.json`."""

import json
from pathlib import Path

from autoshard.plan.document import Plan

SCHEMA_PATH = Path(__file__).with_name("plan.schema.json")


def plan_schema() -> str:
    """The JSON schema, formatted as in `plan.schema.json`."""
    schema = Plan.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(plan_schema(), encoding="utf-8")
