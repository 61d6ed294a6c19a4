"""A random training loop: the same code for a planned model and for one device."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.global_tensors.placed import Placed
from benchmarks.habits.blocks import changes_of, reset_globals
from benchmarks.habits.functions import (
    CONTEXTS,
    INPUTS,
    LOSSES,
    METRICS,
    RESULTS,
    WRITES,
    Parts,
    Step,
    written,
)
from benchmarks.habits.models import Drawn, Planned, leaves, plain_tower
from benchmarks.habits.states import BACKWARDS, GRADIENTS, MODELS, OPTIMIZERS, READS, WEIGHTS, State


@dataclass(frozen=True)
class Note:
    """A number that a loop printed, or a tensor.

    Attributes:
        name: of the habit and the step.
        value: the full tensor, or this rank's part of it.
        layout: of the part.
    """

    name: str
    value: Tensor
    layout: Placed | None = None

    def part(self, full: Tensor) -> Tensor:
        """What of a full tensor is compared with the value."""
        if self.layout is None:
            return full
        place = self.layout
        return Placed.plain(full, place.mesh).resharded(place.layout).local


@dataclass
class Notes:
    """All that a loop has printed so far."""

    found: list[Note] = field(default_factory=list)

    def add(self, name: str, value: Any, *, is_state: bool = False) -> None:
        """Print a value, or several; of state, each rank keeps its part."""
        if value is None:
            return
        if isinstance(value, list | tuple):
            for number, one in enumerate(value):
                self.add(f"{name} {number}", one)
            return
        if is_state and isinstance(value, DTensor):
            place = Placed.of(value)
            self.found.append(Note(name, place.local.detach().to(torch.float64).clone(), place))
            return
        full = autoshard.full_tensor(value)
        is_tensor = isinstance(full, Tensor)
        tensor = full.detach() if is_tensor else torch.as_tensor(full, dtype=torch.float64)
        self.found.append(Note(name, tensor.to(torch.float64).clone()))


@dataclass(frozen=True)
class Habit:
    """Something that a loop does in one of its steps.

    Attributes:
        kind: name of the table.
        name: in the table.
        step: number of the step; -1 for all steps.
        seed: of what the habit chooses.
    """

    kind: str
    name: str
    step: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


TABLES: Mapping[str, Mapping[str, Any]] = {
    "result": {
        **RESULTS,
        **{f"write {name}": written(w, to_copy=False) for name, w in WRITES.items()},
        **{f"write into a copy {name}": written(w, to_copy=True) for name, w in WRITES.items()},
    },
    "input": INPUTS,
    "loss": LOSSES,
    "backward": BACKWARDS,
    "metric": METRICS,
    "read": READS,
    "gradient": GRADIENTS,
    "weight": WEIGHTS,
    "model": MODELS,
}
_SHARES: Mapping[str, Sequence[float]] = {
    "input": (5, 1),
    "result": (1, 3, 3, 2),
    "backward": (4, 1),
    "metric": (2, 3, 2),
    "read": (2, 1),
    "gradient": (3, 2, 1),
    "weight": (5, 2, 1),
    "model": (6, 1),
}
"""Weights of how many habits of each kind a loop has."""
_STEPS = (5, 4, 1)
"""Weights of loops of one, two and three steps."""
_CHANGED, _RESIZED, _ACCUMULATED = 0.3, 0.25, 0.15
"""Shares of loops that change a module, have a batch of another size, add gradients of steps."""
_SLOW = "adafactor"
"""An optimizer that gathers, and takes a second for a step."""
_TRAINED = {"one": 1.0, "two": 0.3, "plain": 0.6, "square": 0.5, "row": 0.5, "scale": 0.6}
"""Shares of loops whose optimizer has a part."""


@dataclass(frozen=True)
class Loop:
    """A random loop.

    Attributes:
        seed: of what the loop chooses.
        habits: what it does.
        rows: of the batch of each step.
        optimizer: name in `OPTIMIZERS`.
        context: of validation.
        trains: which parts the optimizer gets.
        accumulates: True if gradients of two steps are added.
        zeroes: True if gradients are set to zero, not to None.
    """

    seed: str
    habits: tuple[Habit, ...]
    rows: tuple[int, ...]
    optimizer: str
    context: str
    trains: tuple[str, ...]
    accumulates: bool
    zeroes: bool

    @classmethod
    def of(cls, seed: str, drawn: Drawn) -> "Loop":
        """Draw a loop for a model."""
        draw = random.Random(seed)
        steps = draw.choices((1, 2, 3), _STEPS)[0]
        rows = [drawn.rows] * steps
        if draw.random() < _RESIZED:
            rows[draw.randrange(steps)] = draw.choice((3, 4, 5, 8, 9, 12, 16))
        habits = [Habit("loss", draw.choice(list(LOSSES)), -1, draw.randrange(10**6))]
        for kind, shares in _SHARES.items():
            number = draw.choices(range(len(shares)), shares)[0]
            for _ in range(number):
                name = draw.choice(list(TABLES[kind]))
                habits.append(
                    Habit(kind, name, cls._when(kind, steps, draw), draw.randrange(10**6))
                )
        if draw.random() < _CHANGED:
            name = cls._change(drawn, draw)
            habits.append(Habit("change", name, draw.randrange(steps), draw.randrange(10**6)))
        trains = tuple(name for name, share in _TRAINED.items() if draw.random() < share)
        return cls(
            seed,
            tuple(habits),
            tuple(rows),
            draw.choices(list(OPTIMIZERS), [0.2 if n == _SLOW else 1.0 for n in OPTIMIZERS])[0],
            draw.choice([*CONTEXTS, ""]),
            trains,
            draw.random() < _ACCUMULATED,
            draw.random() < _ACCUMULATED,
        )

    @staticmethod
    def _when(kind: str, steps: int, draw: random.Random) -> int:
        once = kind in {"model", "weight"} or draw.random() < 0.3  # noqa: PLR2004
        return draw.randrange(steps) if once else -1

    @staticmethod
    def _change(drawn: Drawn, draw: random.Random) -> str:
        """A change of a module: its name, and that of the change."""
        modules = [
            (name, module)
            for name, module in drawn.build().named_modules()
            if name.startswith("blocks.")
        ]
        # Changes that any module may have are rarer than those of its class.
        name, module = draw.choice(modules)
        own = [c for c in changes_of(module) if not c.endswith(_COMMON)]
        every = list(changes_of(module))
        return f"{name}: {draw.choice(own if own and draw.random() < 0.7 else every)}"  # noqa: PLR2004

    def __str__(self) -> str:
        what = "; ".join(
            str(habit) + ("" if habit.step < 0 else f" in step {habit.step}")
            for habit in self.habits
        )
        flags = {"gradients are added": self.accumulates, "and set to zero": self.zeroes}
        more = "".join(f"; {name}" for name, is_set in flags.items() if is_set)
        return f"{what}; rows {self.rows}; {self.optimizer} of {self.trains}; {self.context}{more}"


_COMMON = (
    "mode of a module",
    "an attribute that nothing reads",
    "a hook",
    "a hook that only looks",
    "a hook before forward",
    "a hook of backward",
)


@dataclass
class Run:
    """A run of a loop.

    Attributes:
        loop: what runs.
        drawn: the model.
        parts: models and parameters.
        notes: what was printed.
    """

    loop: Loop
    drawn: Drawn
    parts: Parts
    notes: Notes = field(default_factory=Notes)

    def run(self) -> None:
        """Run the loop; what it prints is in the notes, also if it fails."""
        torch.manual_seed(7)
        if "two" in self.loop.trains:
            assert self.parts.two is not None
        named = self.parts.named()
        trained = [p for n, p in named.items() if n.partition(".")[0] in self.loop.trains]
        optimizer = OPTIMIZERS[self.loop.optimizer](trained)
        try:
            for number in range(len(self.loop.rows)):
                self._step(number, optimizer)
            self._finish()
        finally:
            reset_globals()

    def _habits(self, kind: str, number: int) -> list[tuple[str, Any, random.Random]]:
        """Habits of a step: names, functions, and the source of what they choose."""
        return [
            (f"step {number}: {h}", TABLES[kind].get(h.name), random.Random(h.seed + number))
            for h in self.loop.habits
            if h.kind == kind and h.step in {-1, number}
        ]

    def _step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        rows = self.loop.rows[number]
        inputs, y = self.drawn.inputs(number, rows), self.drawn.labels(number, rows)
        s = Step(self.parts, inputs, y, random.Random(0))
        self._change(number)
        for name, state, draw in self._habits("model", number):
            self._do(name, state, s, draw)
        if not (self.loop.accumulates and number % 2):
            optimizer.zero_grad(set_to_none=not self.loop.zeroes)
        if not self.drawn.takes_tokens:
            for _, function, s.draw in self._habits("input", number):
                s.inputs["x"] = function(s, s.inputs["x"])
        loss = self._loss(s, number)
        self.notes.add(f"step {number}: loss", loss)
        if loss.requires_grad:
            self._backward(loss, number)
        self.notes.add(f"step {number}: gradient of the input", s.inputs["x"].grad)
        for kind in ("read", "gradient"):
            for name, state, draw in self._habits(kind, number):
                self._do(name, state, s, draw)
        optimizer.step()
        with torch.no_grad():
            for name, state, draw in self._habits("weight", number):
                self._do(name, state, s, draw)
        self._validate(s, number)

    def _backward(self, loss: Tensor, number: int) -> None:
        some = [p for p in self.parts.one.parameters() if p.requires_grad]
        backwards = self._habits("backward", number)
        if not backwards:
            loss.backward()
        for _, backward, _ in backwards:
            backward(loss, some)

    def _do(self, name: str, state: State, s: Step, draw: random.Random) -> None:
        s.draw = draw
        result = state(s)
        if "read" in name or "clip" in name:
            self.notes.add(name, result)

    def _change(self, number: int) -> None:
        for habit in self.loop.habits:
            if habit.kind == "change" and habit.step == number:
                path, _, name = habit.name.partition(": ")
                module = self.parts.one.get_submodule(path)
                # Unknown where an earlier change has replaced the module.
                changes_of(module)[name](module, random.Random(habit.seed))

    def _loss(self, s: Step, number: int) -> Tensor:
        results = self.parts.one(**s.inputs)
        first, *others = leaves(results)
        if first.ndim == 0:
            return first * s.parts.scale if "scale" in self.loop.trains else first
        z: Any = first
        for _, function, draw in self._habits("result", number):
            s.draw = draw
            z = function(s, z)
        (_, loss, draw), *_ = self._habits("loss", number)
        s.draw = draw
        total: Tensor = loss(s, z)
        for other in others:
            total = total + 0.1 * other.square().mean()
        for name, metric, draw in self._habits("metric", number):
            s.draw = draw
            self.notes.add(name, metric(s, z))
        return total

    def _validate(self, s: Step, number: int) -> None:
        """Metrics without gradients."""
        if not self.loop.context:
            return
        metrics = self._habits("metric", number)
        with CONTEXTS[self.loop.context]():
            z = next(leaves(self.parts.one(**s.inputs)))
            if z.ndim == 0:
                self.notes.add(f"step {number}: validation", z)
                return
            for name, metric, draw in metrics:
                s.draw = draw
                self.notes.add(f"{name}, validated", metric(s, z))

    def _finish(self) -> None:
        for name, p in self.parts.named().items():
            self.notes.add(f"gradient of {name}", p.grad, is_state=True)
            self.notes.add(f"weight {name}", p, is_state=True)
        for owner, model in self.parts.planned.items():
            for name, buffer in model.named_buffers():
                self.notes.add(f"buffer {owner}.{name}", buffer, is_state=True)


def parts_of(one: Planned, two: Planned, apply: Callable[[nn.Module, Planned], nn.Module]) -> Parts:
    """Models and parameters, with plans applied or not."""
    classes = one.drawn.classes
    generator = torch.Generator().manual_seed(5)
    square, row = (
        nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
        for shape in ((classes, classes), (classes,))
    )
    return Parts(
        apply(one.drawn.build(), one),
        lambda: apply(two.drawn.build(), two),
        plain_tower(one.drawn),
        square,
        row,
        nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
    )


def perturbed(parts: Parts, size: float) -> Parts:
    """The same parts, with weights that are changed by a small part of them."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in parts.named().values():
            noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.mul_(1 + size * noise)
    return parts
