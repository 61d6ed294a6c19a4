"""Exports in which repeated layers are not traced again equal those in which all are."""

from typing import Any

import pytest

from autoshard import export_model
from autoshard.graph.export.repetition import repeated
from autoshard.graph.export.repetition.repeated import Repetition
from benchmarks.models import MODELS
from tests.support.repeated_layers import X
from tests.support.repeated_layers_in_contexts import CASES


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers that were not traced, of each archive that was lengthened."""
    found: list[int] = []
    plain = Repetition.lengthened

    def lengthened(self: Repetition, archive: bytes) -> bytes:
        found.append(len(self.repeated))
        return plain(self, archive)

    monkeypatch.setattr(Repetition, "lengthened", lengthened)
    return found


def export_in_full(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> bytes:
    with monkeypatch.context() as patch:
        patch.setattr(repeated, "_FEWEST", 1_000_000)
        return export_model(*args, **options)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("name", CASES)
def test_the_export_is_that_in_which_each_layer_is_traced(
    name: str, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CASES[name]
    model = found.model()
    archive = export_model(model, found.args, **found.options)
    assert sum(left_out) == found.count
    whole = export_in_full(monkeypatch, model, found.args, **found.options)
    assert archive == whole


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "bert-base", "t5-base", "mixtral-8x7b"])
def test_published_models_are_exported_as_if_each_layer_were_traced(
    name: str, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kwargs = MODELS[name].build("meta")
    archive = export_model(model, (), kwargs)
    assert sum(left_out) >= 9
    assert archive == export_in_full(monkeypatch, model, (), kwargs)


def test_an_export_in_full_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "autoshard"):
        export_model(CASES["layers that are called twice"].model(), (X,))
    assert "each layer is traced" in caplog.text
    assert "layers.3 is called again" in caplog.text


def test_layers_are_traced_in_full_with_a_torch_that_was_not_tested(
    left_out: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = CASES["layers that are alike"]
    archive = export_model(found.model(), found.args, **found.options)
    assert sum(left_out) == found.count
    left_out.clear()
    monkeypatch.setattr("autoshard.torch_private.versions.NEWEST", (2, 0))
    with caplog.at_level("INFO", "autoshard"):
        assert export_model(found.model(), found.args, **found.options) == archive
    assert not left_out
    assert "each layer is traced: PyTorch 2." in caplog.text
