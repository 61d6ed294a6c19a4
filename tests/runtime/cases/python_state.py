"""Python state that forward reads, changed after the export: refused, or right by another plan."""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from runtime.cases.habits import assert_same
from runtime.cases.python_state_models import (
    FEATURES,
    HIDDEN,
    Asking,
    Between,
    Config,
    Counter,
    Counting,
    Dropping,
    Holding,
    Net,
    Tempered,
    curve,
    frozen_norm,
    modes_without_effect,
    set_global,
)
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from autoshard.errors import ExportError, PlanError
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize

Change = Callable[[nn.Module], object]

PINS = {
    "4": {"inputs": {"x": "S(0)"}, "parameters": {"up.*": "S(0)", "down.weight": "S(1)"}},
    "2x2": {"inputs": {"x": "S(0),R"}, "parameters": {"up.*": "I,S(0)", "down.weight": "S(0),I"}},
}
"""By mesh; the batch and the weights are sharded."""


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, FEATURES, generator=generator, dtype=torch.float64)


def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * functional.linear(x, module.weight, module.bias)


def halved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Net.forward(model, x) * 0.5


def patch(model: nn.Module) -> None:
    model.up.forward = MethodType(doubled, model.up)


@dataclass
class Changed:
    """A change that the planned program would not follow.

    Attributes:
        mesh: its name.
        build: makes the model.
        change: what is changed after the export.
        match: what the error says.
        undo: sets it back.
        within: a context of the calls after the change, and of their export.
        is_random: True if the changed model draws random numbers.
        mode: of the plan for the changed model; empty if there can be none.
        num_calls: calls before the change.
    """

    mesh: str
    build: Callable[[], nn.Module]
    change: Change
    match: str
    undo: Change | None = None
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    is_random: bool = False
    mode: str = "training"
    num_calls: int = 1
    plans: dict[str, Plan] = field(init=False)

    def prepare(self) -> None:
        self.plans = {"then": self.plan(self.model())}
        if self.mode:
            changed = self.model()
            try:
                self.change(changed)
                with self.within():
                    pins = self.plans["then"].state_pins().model_dump(exclude_defaults=True)
                    self.plans["now"] = self.plan(changed, self.mode, pins)
            finally:
                self.clean(changed)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def plan(
        self, model: nn.Module, mode: str = "training", pins: Mapping[str, Any] | None = None
    ) -> Plan:
        pins = {**PINS[self.mesh], **(pins or {})}
        options = PlanOptions(pins=pins, mode=mode)
        plan = make_plan(
            graph_of((model, {"x": batch()})), slow_devices(**MESHES[self.mesh]), options
        )
        assert plan.found, plan.reason
        return plan

    def clean(self, model: nn.Module) -> None:
        if self.undo is not None:
            self.undo(model)

    def __call__(self) -> None:
        mesh = device_mesh(self.plans["then"])
        planned = parallelize(self.model(), self.plans["then"], mesh)
        reference = self.model()
        try:
            for _ in range(self.num_calls):
                self.compare(planned, reference)
            self.change(planned)
            for _ in range(2):
                with self.within(), pytest.raises(PlanError, match=self.match):
                    planned(batch())
        finally:
            self.clean(planned)
        if self.undo is not None:
            self.compare(planned, reference)
        if self.mode:
            self.check_both()

    def check_both(self) -> None:
        """The advice: a plan of the changed model, passed together with the other one."""
        planned, reference = self.model(), self.model()
        parallelize(planned, self.plans, device_mesh(self.plans["then"]))
        try:
            self.compare(planned, reference)
            self.change(planned)
            self.change(reference)
            with self.within():
                self.compare(planned, reference, is_random=self.is_random)
        finally:
            self.clean(planned)
            self.clean(reference)

    def compare(
        self, planned: nn.Module, reference: nn.Module, *, is_random: bool | None = None
    ) -> None:
        """One call has the loss, the gradients and the buffers of the model on one device."""
        if is_random or (is_random is None and self.draws(reference)):
            assert float(whole(planned(batch()).detach())) != float(
                whole(planned(batch()).detach())
            )
            return
        found = []
        for model in (planned, reference):
            model.zero_grad()
            loss = model(batch())
            if loss.requires_grad:
                loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            found.append((loss, gradients, dict(model.named_buffers())))
        assert_same(*found, "call")

    @staticmethod
    def draws(model: nn.Module) -> bool:
        return any(isinstance(m, nn.Dropout) and m.training and m.p for m in model.modules()) or (
            isinstance(model, Asking) and model.how == "dropout" and model.training
        )


@dataclass
class Averaging(Changed):
    """`update_bn` changes momenta before it calls the model, and runs if they are not read."""

    def __call__(self) -> None:
        planned, reference = self.model(), self.model()
        parallelize(planned, self.plans["then"], device_mesh(self.plans["then"]))
        with pytest.raises(PlanError, match=self.match):
            update_bn([batch()], planned)
        self.clean(planned)
        self.change(reference)  # as `update_bn` begins
        self.change(planned)
        self.clean(planned)
        self.clean(reference)
        self.compare(planned, reference)


@dataclass
class OwnForward(Changed):
    """A model with a forward of its own, before and after the export."""

    def __call__(self) -> None:
        mesh = device_mesh(self.plans["then"])
        changed = self.model()
        self.change(changed)
        with pytest.raises(PlanError, match="the code of 'forward' is not the code"):
            parallelize(deepcopy(changed), self.plans["then"], mesh)
        with pytest.raises(PlanError, match=r"the code of .*Net\.forward|'forward'"):
            parallelize(self.model(), self.plans["now"], mesh)
        planned = parallelize(deepcopy(changed), self.plans["now"], mesh)
        self.compare(planned, changed)
        with pytest.warns(UserWarning, match="run the unsharded model on every rank"):
            smaller = planned(batch()[:5])
        assert_same(whole(smaller.detach()), changed(batch()[:5]).detach(), "smaller batch")
        planned = parallelize(self.model(), self.plans["then"], mesh)
        planned.forward = MethodType(halved, planned)
        with pytest.raises(PlanError, match=r"model\.forward was replaced after.*ignore_state"):
            planned(batch())
        del planned.forward
        self.compare(planned, self.model())
        plain = planned.forward
        planned.forward = lambda x: plain(x) * 3
        assert_same(planned(batch()).detach(), self.model()(batch()).detach() * 3, "wrapped")


@dataclass
class Followed(Changed):
    """What an error advises, which each call follows."""

    mode: str = ""

    def __call__(self) -> None:
        planned, reference = self.model(), self.model()
        parallelize(planned, self.plans["then"], device_mesh(self.plans["then"]))
        self.compare(planned, reference)
        for model in (planned, reference):
            self.change(model)
        self.compare(planned, reference)


def dropped(number: int) -> dict[str, Any]:
    generator = random.Random(number)
    random.seed(number)
    return {"x": batch(), "keep": torch.tensor(generator.random() < 0.5)}


def dropped_by_numpy(number: int) -> dict[str, Any]:
    generator = np.random.RandomState(number)
    np.random.seed(number)  # noqa: NPY002  as the forward that draws
    return {"x": batch(), "keep": torch.tensor(generator.rand() < 0.5)}


@dataclass
class RefusedExport:
    """Forward that changes what it reads is not exported; the way out has the same numbers.

    Attributes:
        mesh: its name.
        build: makes the model.
        match: what the error says.
        advised: makes the model that the error advises.
        options: of its export.
        arguments: of each call of the planned model.
    """

    mesh: str
    build: Callable[[], nn.Module]
    match: str
    advised: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[int], dict[str, Any]] = lambda number: {"x": batch(number)}
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        with pytest.raises(ExportError, match=self.match):
            export_model(self.build().double(), (batch(),))
        archive = export_model(self.advised().double(), (), self.arguments(0), **self.options)
        options = PlanOptions(pins=PINS[self.mesh])
        mesh = slow_devices(**MESHES[self.mesh])
        self.plan = make_plan(load_graph(archive), mesh, options)
        assert self.plan.found, self.plan.reason

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = self.build().double()
        torch.manual_seed(0)
        planned = parallelize(self.advised().double(), self.plan, device_mesh(self.plan))
        for number in range(4):
            found = planned(**self.arguments(number))
            expected = reference(batch() if "keep" in self.arguments(number) else batch(number))
            assert_same(found.detach(), expected.detach(), f"call {number}")


def harmless(model: nn.Module) -> None:
    """What forward does not read, and what has the same value."""
    model.unread, model.tau, model.added = 5.0, float("2.0"), 1.0
    model.config.unread, model.options.unread = 3.0, 2
    model.config = Config(unread=7.0)
    model.scales, model.activation = [1.0, 2.0], torch.tanh
    model.curve = curve(1.0)
    model.register_forward_hook(lambda *_: None)
    model.requires_grad_(requires_grad=True)
    model.eval()


@dataclass
class Accepted(Changed):
    """Changes that make no difference are no reason to refuse a call."""

    def __call__(self) -> None:
        planned, reference = self.model(), self.model()
        parallelize(planned, self.plans["then"], device_mesh(self.plans["then"]))
        for change in (lambda _: None, self.change, nn.Module.train, nn.Module.eval, deepcopy):
            for model in (planned, reference):
                change(model)
            self.compare(planned, reference)
        self.compare(deepcopy(planned), reference)


@dataclass
class Ignored(Changed):
    """`ignore_state` goes on with the program, which has the numbers of the export."""

    def __call__(self) -> None:
        mesh, reference = device_mesh(self.plans["then"]), self.model()
        options = {"ignore_state": ["up._forward_hooks", "ta?", "config"]}
        planned = parallelize(self.model(), self.plans["then"], mesh, **options)
        self.change(planned)
        self.compare(planned, reference)


def logged(model: nn.Module) -> None:
    model.up.register_forward_hook(lambda *_: None)
    model.tau, model.config.tau = 7.0, 7.0


def hooked(model: nn.Module) -> None:
    model.handle = model.up.register_forward_hook(lambda _, __, result: result * 2)


def without_layer(model: nn.Module) -> None:
    del model.inner[1]


def with_layer(model: nn.Module) -> None:
    del model.inner[1:]
    model.inner.append(nn.ReLU())


def edited(model: nn.Module) -> None:
    del model
    Holding.middle = lambda _, h: torch.relu(h)


def restored(model: nn.Module, plain: Any = Holding.middle) -> None:
    del model
    Holding.middle = plain


def attribute(name: str, value: object, before: object) -> dict[str, Change]:
    """A change of an attribute of the model, or of an object that it has."""
    *path, last = name.split(".")

    def put(model: nn.Module, value: object) -> None:
        holder: Any = model
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, last, value)

    return {"change": partial(put, value=value), "undo": partial(put, value=before)}


def changes_of(mesh: str) -> dict[str, Callable[[], None]]:
    norm, drop = (lambda: Between(nn.BatchNorm1d(HIDDEN))), (lambda: Between(nn.Dropout(0.5)))
    changed = partial(Changed, mesh)
    holding = partial(Changed, mesh, Holding)
    return {
        "a frozen batch norm": changed(
            norm,
            lambda m: m.inner[0].eval(),
            r"'inner\.0' is evaluation now.*call model\.train\(\)",
            nn.Module.train,
        ),
        "a batch norm that was frozen": changed(
            frozen_norm,
            nn.Module.train,
            r"'inner\.0' is training now.*call model\.eval\(\)",
            lambda m: m.inner[0].eval(),
        ),
        "one of two dropouts": changed(
            lambda: Between(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)),
            lambda m: m.inner[0].eval(),
            r"'inner\.0' is evaluation now",
            nn.Module.train,
            is_random=True,
        ),
        "Monte-Carlo dropout": changed(
            lambda: drop().eval(),
            lambda m: m.inner[0].train(),
            r"'inner\.0' is training now.*would have no effect.*call model\.eval\(\)",
            nn.Module.eval,
            is_random=True,
        ),
        "forward asks for its mode": changed(
            lambda: Asking("training"), nn.Module.eval, r"'the model' is eval", nn.Module.train
        ),
        "forward passes its mode on": changed(
            lambda: Asking("dropout"),
            nn.Module.eval,
            r"'the model' is evaluation now",
            nn.Module.train,
            is_random=False,
        ),
        "forward asks whether gradients are enabled": changed(
            lambda: Asking("gradients"),
            lambda _: None,
            r"asks for 'torch\.is_grad_enabled\(\)', which is False now.*torch\.no_grad\(\)",
            within=torch.no_grad,
            mode="inference",
        ),
        "an attribute": holding(
            match=r"'tau', which is 0\.5 now and was 2\.0.*buffer.*ignore_state=\['tau'\]",
            **attribute("tau", 0.5, 2.0),
        ),
        "an attribute in vars": holding(
            lambda m: vars(m).update(tau=0.5), r"'tau'", lambda m: vars(m).update(tau=2.0)
        ),
        "the probability of a dropout": changed(
            drop, match=r"'inner\.0\.p', which is 0\.0 now", **attribute("inner.0.p", 0.0, 0.5)
        ),
        "a momentum": changed(
            norm, match=r"'inner\.0\.momentum'", **attribute("inner.0.momentum", 0.5, 0.1)
        ),
        "update_bn": Averaging(
            mesh,
            norm,
            match=r"'inner\.0\.momentum', which is None now",
            mode="",
            **attribute("inner.0.momentum", None, 0.1),
        ),
        "a flag": holding(match="'aux'", **attribute("aux", True, False)),
        "an activation": holding(
            match=r"'activation', which is .*relu now and was .*tanh",
            **attribute("activation", torch.relu, torch.tanh),
        ),
        "a buffer that was None": holding(
            match="'shift', which is a tensor now and was None.*such as zeros",
            mode="",
            **attribute("shift", torch.ones(HIDDEN, dtype=torch.float64), None),
        ),
        "a buffer without effect at first": Followed(
            mesh, partial(Tempered, shift=torch.zeros(HIDDEN)), lambda m: m.shift.fill_(1.0), ""
        ),
        "a buffer for an attribute": Followed(
            mesh, partial(Tempered, tau=torch.ones(())), lambda m: m.tau.fill_(0.5), ""
        ),
        "a list": holding(lambda m: m.scales.append(3.0), "'scales'", lambda m: m.scales.pop()),
        "a dict": holding(
            lambda m: m.names.update(a=2.0), "'names'", lambda m: m.names.update(a=1.0)
        ),
        "set_epoch": holding(
            lambda m: m.set_epoch(5), "'epoch', which is 5 now", lambda m: m.set_epoch(0)
        ),
        "a dataclass": holding(
            match=r"'config\.tau', which is 3\.0", **attribute("config.tau", 3.0, 1.0)
        ),
        "a namespace": holding(match=r"'options\.power'", **attribute("options.power", 3.0, 1.0)),
        "a closure": holding(match="'curve", **attribute("curve", curve(0.2), curve(1.0))),
        "a closure of the same code": holding(
            match="'second", **attribute("second", curve(0.2), curve(1.0))
        ),
        "a class": holding(
            lambda _: setattr(Holding, "limit", 0.5),
            r"'Holding\.limit', which is 0\.5 now",
            lambda _: setattr(Holding, "limit", 4.0),
        ),
        "a global": holding(
            set_global,
            r"python_state_models\.FACTOR', which is 5\.0",
            partial(set_global, value=1.0),
        ),
        "code of a class": holding(edited, r"the code of 'Holding\.middle' is not", restored),
        "forward of an inner module": changed(
            Net,
            patch,
            r"the code of 'up\.forward' is not the code",
            lambda m: vars(m.up).pop("forward", None),
        ),
        "forward of the model": OwnForward(
            mesh, Net, lambda m: setattr(m, "forward", MethodType(halved, m)), ""
        ),
        "a removed layer": changed(
            lambda: Between(nn.Tanh(), nn.ReLU()),
            without_layer,
            r"modules 'inner.* were replaced, added or removed",
            with_layer,
        ),
        "a layer replaced after five calls": changed(
            lambda: Between(nn.Tanh()),
            lambda m: m.inner.__setitem__(0, nn.ReLU()),
            r"modules 'inner.* were replaced, added or removed",
            lambda m: m.inner.__setitem__(0, nn.Tanh()),
            num_calls=5,
        ),
        "a hook": changed(Net, hooked, r"hooks of 'up' do not run", lambda m: m.handle.remove()),
        "ignored": Ignored(mesh, Holding, logged, "", mode=""),
        "what is not read": Accepted(mesh, Holding, harmless, "", mode=""),
        "modes without effect": Accepted(mesh, modes_without_effect, nn.Module.eval, "", mode=""),
        "a counter": RefusedExport(
            mesh,
            Counting,
            r"calls \(from 0 to 1\)\. Make it a buffer.*ignore_state=\['calls'\]",
            partial(Counting, in_buffer=True),
        ),
        "a counter in a module": RefusedExport(
            mesh,
            lambda: Between(Counter()),
            r"inner\.0\.calls \(from 0 to 1\).*opaque=\['inner\.0'\]",
            lambda: Between(Counter()),
            {"opaque": ["inner.0"]},
        ),
        "random numbers of Python": RefusedExport(
            mesh, Dropping, r"random \(numbers are drawn\).*argument", Dropping, {}, dropped
        ),
        "random numbers of numpy": RefusedExport(
            mesh,
            partial(Dropping, np.random.rand),
            r"draw \(numbers are drawn\).*argument",
            Dropping,
            {},
            dropped_by_numpy,
        ),
    }


CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": case for mesh in MESHES for name, case in changes_of(mesh).items()
}
