"""The parts of a measurement, in the order of their value."""

from dataclasses import dataclass

MODELS = ("gpt2", "llama", "moe", "vit")
"""Names of the models that run on one rank."""

MODULES = {
    "models": "one_rank",
    "ranks": "shared_gpu",
    "unexplained": "unexplained",
    "cases": "cases",
    "device": "calibration",
}
"""The module of each part, with a function `run(job)`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the measurement.

    Attributes:
        name: of the part, and of its file.
        seconds: its share of the time; it may have what others before it have left.
        processes: names of its processes, which run side by side.
        shares_gpu: True if several ranks share the GPU.
    """

    name: str
    seconds: float
    processes: tuple[str, ...]
    shares_gpu: bool = False


def parts_of(device: str, models: tuple[str, ...]) -> tuple[Part, ...]:
    """The parts; their shares and the preparation take 480 seconds together."""
    return (
        Part("models", 185, models),
        Part("ranks", 80, ("ranks",), shares_gpu=True),
        Part("unexplained", 40, tuple(dict.fromkeys(("cpu", device))), shares_gpu=True),
        Part("cases", 100, ("cases",), shares_gpu=True),
        Part("device", 45, ("device",)),
    )
