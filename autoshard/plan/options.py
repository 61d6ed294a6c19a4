"""What users ask of a plan, besides graph and mesh."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["training", "inference"]


class PlanOptions(BaseModel):
    """Options of planning; every default is what most people want."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field(
        default="training",
        description="training prices forward, backward and the optimizer; inference forward.",
    )
    optimizer: str = Field(
        default="adamw", description="whose state is kept and updated in training."
    )
    memory_budget: int | None = Field(
        default=None,
        gt=0,
        description="bytes per device that the peak must obey; the device's memory if null.",
    )
    time_limit: float = Field(default=120.0, gt=0, description="seconds for the solver.")
    relative_gap: float = Field(
        default=1e-4, ge=0, lt=1, description="stop when the proven gap is at most this."
    )
    seed: int = Field(default=0, ge=0, description="for the solver's own choices.")
