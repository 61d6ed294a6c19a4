import gc
from collections.abc import Iterator

import pytest

from autoshard.collection import collection_paused


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    was_running = gc.isenabled()
    yield
    (gc.enable if was_running else gc.disable)()


def test_collection_is_paused_inside_and_goes_on_afterwards() -> None:
    gc.enable()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_goes_on_after_an_error() -> None:
    gc.enable()

    @collection_paused()
    def fail() -> None:
        raise ValueError(gc.isenabled())

    with pytest.raises(ValueError, match="False"):
        fail()
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()
