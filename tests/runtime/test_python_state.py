"""Changes of Python state after an export: noticed if forward reads it, and only then.

Each model is exported as users do, and its record compared with the model, without ranks.
"""

import contextvars
import copy
import dataclasses
import enum
import functools
import io
import itertools
import os
import random
import threading
import time
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize

from autoshard.errors import ExportError, PlanError
from autoshard.graph import export_model, load_graph
from autoshard.runtime.python_state.state import PythonState

SIZE = 8
Change = Callable[[Any], object]


class Net(nn.Module):
    """Two layers with a function between them."""

    middle: Callable[["Net", torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x)))


def net(
    middle: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any
) -> Callable[[], nn.Module]:
    """Makes models of one class, with attributes of their own."""
    kind = type("Made", (Net,), {"middle": middle, "__module__": __name__})

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = kind()
        for name, make in attributes.items():
            setattr(model, name, make())
        return model

    return build


def exported_state(model: nn.Module, **options: Any) -> PythonState:
    x = torch.ones(2, SIZE)
    graph = load_graph(export_model(model, (x,), **options))
    state = PythonState(model, {"": graph}, [n for n, _ in model.named_parameters()], ())
    state.check_applies()
    model(x)
    state.check(model, "")
    return state


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    tau: float = 1.0
    unread: float = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    tau: float = 1.0
    unread: float = 1.0


class Named(NamedTuple):
    tau: float = 1.0


class Scaled:
    """Called like a function."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.factor


class Child(nn.Module):
    """Has a method that its owner calls in place of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0

    def extended(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.alpha


class Lora(nn.Module):
    """Adapters that are switched as those of PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE)
        self.ins = nn.ModuleDict({n: nn.Linear(SIZE, 2, bias=False) for n in "ab"})
        self.outs = nn.ModuleDict({n: nn.Linear(2, SIZE, bias=False) for n in "ab"})
        self.active, self.disabled, self.merged = ["a"], False, list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x)
        for name in [] if self.disabled else self.active:
            h = h + self.outs[name](self.ins[name](x))
        return h


def with_default(h: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return h * factor


def with_attribute(h: torch.Tensor) -> torch.Tensor:
    return h * with_attribute.tau  # type: ignore[attr-defined]


with_attribute.tau = 1.0  # type: ignore[attr-defined]
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
LOCAL.tau = 1.0


def cell() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    """A function with a free variable, and one that sets it."""
    factor = 1.0

    def put(value: float) -> None:
        nonlocal factor
        factor = value

    return lambda h: h * factor, put


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set back what changes outside of models."""
    monkeypatch.setattr(with_attribute, "tau", 1.0)
    monkeypatch.delenv("some_factor", raising=False)
    defaults = with_default.__defaults__
    context = VARIABLE.set(1.0)
    yield
    VARIABLE.reset(context)
    LOCAL.tau = 1.0
    with_default.__defaults__ = defaults


NOTICED: dict[str, tuple[Callable[[], nn.Module], Change, str]] = {
    "an enum": (
        net(lambda m, h: h if m.kind is Color.RED else 2 * h, kind=lambda: Color.RED),
        lambda m: setattr(m, "kind", Color.BLUE),
        "Color.BLUE now and was Color.RED",
    ),
    "a frozen dataclass": (
        net(lambda m, h: h * m.config.tau, config=Frozen),
        lambda m: setattr(m, "config", Frozen(tau=2.0)),
        r"'config\.tau', which is 2\.0",
    ),
    "a dataclass with slots": (
        net(lambda m, h: h * m.config.tau, config=Slotted),
        lambda m: setattr(m.config, "tau", 2.0),
        r"'config\.tau', which is 2\.0",
    ),
    "a named tuple": (
        net(lambda m, h: h * m.config.tau, config=Named),
        lambda m: setattr(m, "config", Named(2.0)),
        "'config'",
    ),
    "a user dict": (
        net(lambda m, h: h * m.config["tau"], config=lambda: UserDict(tau=1.0)),
        lambda m: m.config.update(tau=2.0),
        r"'config\.data'",
    ),
    "a large list": (
        net(lambda m, h: h * m.table[15_000], table=lambda: [1.0] * 20_000),
        lambda m: m.table.__setitem__(15_000, 2.0),
        "'table'",
    ),
    "one of many objects": (
        net(lambda m, h: h * m.table[399].tau, table=lambda: [Slotted() for _ in range(400)]),
        lambda m: setattr(m.table[399], "tau", 2.0),
        r"'table\[399\]\.tau'",
    ),
    "a large array": (
        net(lambda m, h: h * float(m.table[5]), table=lambda: np.ones(100_000)),
        lambda m: m.table.__setitem__(5, 2.0),
        "'table'",
    ),
    "a number of numpy": (
        net(lambda m, h: h * float(m.tau), tau=lambda: np.float64(1.0)),
        lambda m: setattr(m, "tau", np.float64(2.0)),
        "'tau', which is 2.0",
    ),
    "bytes that change": (
        net(lambda m, h: h * len(m.data), data=lambda: bytearray(b"a")),
        lambda m: m.data.append(1),
        "'data'",
    ),
    "through vars": (
        net(lambda m, h: h * vars(m)["tau"], tau=lambda: 1.0),
        lambda m: setattr(m, "tau", 2.0),
        "'tau'",
    ),
    "through getattr": (
        net(lambda m, h: h * getattr(m, m.name), tau=lambda: 1.0, name=lambda: "tau"),
        lambda m: setattr(m, "tau", 2.0),
        "'tau'",
    ),
    "a parameter where there was none": (
        net(lambda m, h: h * getattr(m, "gain", 1.0)),
        lambda m: setattr(m, "gain", nn.Parameter(torch.ones(1))),
        "'gain', which is a tensor now and was missing",
    ),
    "a class attribute where there was none": (
        net(lambda m, h: h * getattr(m, "gain", 1.0)),
        lambda m: setattr(type(m), "gain", 2.0),
        "'gain', which is 2.0 now and was missing",
    ),
    "an attribute that hides one of the class": (
        net(lambda m, h: m.child.extended(h), child=Child),
        lambda m: setattr(m.child, "extended", lambda h: 2 * h),
        r"'child\.extended'",
    ),
    "an inner forward in place of another attribute": (
        net(lambda _, h: torch.tanh(h)),
        lambda m: (delattr(m.up, "in_features"), setattr(m.up, "forward", lambda h: 2 * h)),
        r"the code of 'up\.forward' is not",
    ),
    "a callable object": (
        net(lambda m, h: m.scaled(h), scaled=Scaled),
        lambda m: setattr(m.scaled, "factor", 2.0),
        r"'scaled\.factor'",
    ),
    "a free variable": (
        net(lambda m, h: m.pair[0](h), pair=cell),
        lambda m: m.pair[1](2.0),
        "which is 2.0 now and was 1.0",
    ),
    "a default of an argument": (
        net(lambda _, h: with_default(h)),
        lambda _: setattr(with_default, "__defaults__", (2.0,)),
        "with_default', which is .2.0. now",
    ),
    "an attribute of a function": (
        net(lambda _, h: with_attribute(h)),
        lambda _: setattr(with_attribute, "tau", 2.0),
        r"with_attribute\.tau', which is 2\.0 now",
    ),
    "keywords of a partial": (
        net(lambda m, h: m.part(h), part=lambda: functools.partial(with_default, factor=1.0)),
        lambda m: m.part.keywords.update(factor=2.0),
        "'part'",
    ),
    "a context variable": (
        net(lambda _, h: h * VARIABLE.get()),
        lambda _: VARIABLE.set(2.0),
        r"VARIABLE', which is 2\.0 now and was 1\.0",
    ),
    "what a thread has": (
        net(lambda _, h: h * LOCAL.tau),
        lambda _: setattr(LOCAL, "tau", 2.0),
        r"LOCAL\.tau', which is 2\.0",
    ),
    "an environment variable": (
        net(lambda m, h: h * float(os.getenv(m.name, "1")), name=lambda: "some_factor"),
        lambda _: os.environ.update(some_factor="2"),
        r'os.environ\["some_factor"\]',
    ),
    "a layer in a list": (
        net(lambda m, h: m.layers(h), layers=lambda: nn.Sequential(nn.Tanh(), nn.ReLU())),
        lambda m: m.layers.append(nn.Sigmoid()),
        "modules 'layers' were replaced, added or removed",
    ),
    "a layer in a dict": (
        net(lambda m, h: m.layers["a"](h), layers=lambda: nn.ModuleDict({"a": nn.Tanh()})),
        lambda m: m.layers.update({"a": nn.ReLU()}),
        "modules .*'layers.a'",
    ),
    "a parametrization": (
        net(lambda _, h: torch.tanh(h)),
        lambda m: parametrize.register_parametrization(m.up, "weight", nn.Identity()),
        "modules 'up' were replaced",
    ),
    "another adapter": (
        net(lambda m, h: m.lora(h), lora=Lora),
        lambda m: m.lora.active.__setitem__(0, "b"),
        r"'lora\.active', which is \['b'\]",
    ),
    "adapters switched off": (
        net(lambda m, h: m.lora(h), lora=Lora),
        lambda m: setattr(m.lora, "disabled", True),
        r"'lora\.disabled'",
    ),
    "a hook that is removed from a dict": (
        lambda: hooked(net(lambda _, h: torch.tanh(h))()),
        lambda m: setattr(m.up, "_forward_hooks", type(m.up._forward_hooks)()),
        "hooks of 'up' are not those",
    ),
}


def hooked(model: nn.Module) -> nn.Module:
    model.up.register_forward_hook(lambda _, __, result: 2 * result)
    return model


@pytest.mark.matrix
@pytest.mark.parametrize("name", NOTICED)
def test_changes_of_what_forward_reads_are_errors(name: str) -> None:
    build, change, match = NOTICED[name]
    model = build()
    state = exported_state(model)
    change(model)
    for _ in range(2):
        with pytest.raises(PlanError, match=match):
            state.check(model, "")


UNNOTICED: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "an equal frozen dataclass": (
        NOTICED["a frozen dataclass"][0],
        lambda m: setattr(m, "config", Frozen(unread=5.0)),
    ),
    "an equal array": (
        NOTICED["a large array"][0],
        lambda m: setattr(m, "table", np.ones(100_000)),
    ),
    "an unread slot": (
        NOTICED["a dataclass with slots"][0],
        lambda m: setattr(m.config, "unread", 2.0),
    ),
    "an equal partial": (
        NOTICED["keywords of a partial"][0],
        lambda m: setattr(m, "part", functools.partial(with_default, factor=1.0)),
    ),
    "an unread environment variable": (
        NOTICED["an environment variable"][0],
        lambda _: os.environ.update(some_other_factor="2"),
    ),
    "an unread module of a dict": (
        NOTICED["a layer in a dict"][0],
        lambda m: m.layers.update({"b": nn.ReLU()}),
    ),
    "an alike module": (
        NOTICED["a layer in a list"][0],
        lambda m: m.layers.__setitem__(0, nn.Tanh()),
    ),
    "an unread attribute of a layer": (
        NOTICED["a layer in a list"][0],
        lambda m: setattr(m.up, "note", "new"),
    ),
    "adapters that were not merged": (
        NOTICED["another adapter"][0],
        lambda m: m.lora.merged.append("a"),
    ),
    "another adapter added": (
        NOTICED["another adapter"][0],
        lambda m: m.lora.ins.update({"c": nn.Linear(SIZE, 2)}),
    ),
    "eval of a weight norm": (
        net(
            lambda m, h: m.normed(h),
            normed=lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
        ),
        nn.Module.eval,
    ),
}


@pytest.mark.parametrize("name", UNNOTICED)
def test_other_changes_are_accepted(name: str) -> None:
    build, change = UNNOTICED[name]
    model = build()
    state = exported_state(model)
    change(model)
    for _ in range(2):
        state.check(model, "")


def test_hooks_of_all_modules_are_noticed_until_they_are_removed() -> None:
    model = NOTICED["a layer in a list"][0]()
    state = exported_state(model)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(PlanError, match="hooks of 'all modules' do not run"):
            state.check(model, "")
    finally:
        handle.remove()
    state.check(model, "")


@pytest.mark.parametrize("copied", [copy.deepcopy, "pickled"])
def test_copies_of_a_model_are_compared_on_their_own(copied: Any) -> None:
    model = Lora()
    state = exported_state(model)
    if copied == "pickled":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copied(model)
    state.check(other, "")
    other.disabled = True
    state.check(model, "")
    with pytest.raises(PlanError, match="'disabled', which is True now"):
        state.check(other, "")


DRAWN: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a clock": (lambda _, h: h * time.perf_counter(), r"time\.perf_counter \(another result"),
    "the date": (lambda _, h: h * datetime.now(UTC).microsecond, r"datetime\.now \(another"),
    "random numbers of the system": (lambda _, h: h * os.urandom(1)[0], r"os\.urandom"),
    "a new generator": (
        lambda _, h: h * np.random.default_rng().random(),
        r"numpy\.random\.default_rng \(another result",
    ),
    "another generator of Python": (
        lambda _, h: h * random.Random().random(),
        r"random\.Random \(another result in each call\)",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_forward_that_draws_is_not_exported(name: str) -> None:
    middle, match = DRAWN[name]
    with pytest.raises(ExportError, match=rf"{match}.*argument.*ignore_state"):
        export_model(net(middle)(), (torch.ones(2, SIZE),))


def test_clocks_that_change_no_result_are_exported() -> None:
    def timed(model: Any, h: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        h = functional.relu(h)
        model.unread = time.perf_counter() - start
        return h

    with pytest.raises(ExportError, match=r"unread.*ignore_state=\['unread'\]"):
        exported_state(net(timed)())
    exported_state(net(timed)(), ignore_state=["unread"])
    generators = types.SimpleNamespace(new=lambda: random.Random(0))
    exported_state(net(lambda _, h: h * generators.new().random())())


def test_iterators_advance() -> None:
    numbers = net(lambda m, h: h * next(m.numbers), numbers=itertools.count)
    with pytest.raises(ExportError, match=r"numbers \(an iterator, which advances\)"):
        export_model(numbers(), (torch.ones(2, SIZE),))
