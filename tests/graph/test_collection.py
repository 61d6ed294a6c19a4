import gc
import weakref
from collections.abc import Iterator

import pytest

from autoshard.base.collection import collection_of_new, collection_paused


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    was_running = gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
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


class _Ring:
    def __init__(self) -> None:
        self.me = self


def test_only_new_objects_are_looked_at() -> None:
    old = _Ring()
    seen = weakref.ref(old)
    with collection_of_new():
        new = weakref.ref(_Ring())
        del old
        gc.collect()
        assert seen() is not None
        assert new() is None
    assert not gc.get_freeze_count()
    gc.collect()
    assert seen() is None


def test_what_others_set_aside_stays_there() -> None:
    gc.freeze()
    with collection_of_new():
        pass
    assert gc.get_freeze_count()


def test_what_was_built_meanwhile_is_old() -> None:
    gc.enable()
    with collection_paused():
        built = [[] for _ in range(10_000)]
    young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
    assert young.isdisjoint(map(id, built))
