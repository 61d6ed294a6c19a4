import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.errors import LayoutError
from autoshard.layouts import (
    AxisType,
    I,
    Layout,
    P,
    R,
    S,
    from_placements,
    has_placements,
    layout_of_texts,
    legal_layouts,
    parse_type,
    placement_texts,
    to_placements,
)

SIZES = (2, 4)
SHAPE = (8, 16)


@st.composite
def layouts(
    draw: st.DrawFn,
    num_dims: int = 2,
    num_axes: int = 3,
    sub_shards: tuple[tuple[int, ...], ...] = ((), (1, 1, 1), (4, 1, 1)),
) -> Layout:
    drawn = draw(st.tuples(*[st.sampled_from(sub_shards)] * num_dims))
    shards = [S(d, drawn[d]) for d in range(num_dims)]
    types = draw(st.tuples(*[st.sampled_from([I, R, P, *shards])] * num_axes))
    return Layout.nested(types, draw(st.permutations(range(num_axes))))


@given(layouts())
def test_text_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text",
    [
        "S(-1)",
        "S",
        "X",
        "S(0),S(0);0>1",
        "S(0),R;1>0",
        "S(0),S(0);1>0>2",
        "R,R;a>b",
        "S(0)/3",
        "S(0)/1+0",
        "S(0)/1+1,S(0)",
        "S(0)/1+1,S(0)/2+1",
    ],
)
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


def test_a_dim_counted_from_the_end_is_refused() -> None:
    with pytest.raises(LayoutError, match="count dims from 0"):
        S(-1)


def test_types_read_back() -> None:
    types = [I, R, P, S(3), S(3, (1, 1, 1)), S(0, (4, 1, 1))]
    assert [parse_type(str(t)) for t in types] == types


def test_sub_shards_are_relative_sizes() -> None:
    assert str(S(0, (4096, 1024, 1024))) == "S(0)/4+1+1"
    assert S(0, (768, 768)) == S(0, (1, 1))
    assert S(0, (768,)) == S(0)


def test_local_shape_divides_each_dim_by_the_axes_that_shard_it() -> None:
    assert Layout((S(1), S(1))).local_shape(SHAPE, SIZES) == (8, 2)
    assert Layout((S(0), P)).local_shape(SHAPE, SIZES) == (4, 16)
    assert Layout((I, R)).local_shape(SHAPE, SIZES) == SHAPE


@pytest.mark.parametrize("layout", ["S(0),S(0)", "R,S(0)", "R,S(2)"])
def test_an_axis_that_does_not_divide_is_refused(layout: str) -> None:
    assert not Layout.parse(layout).is_legal((6, 16), SIZES)
    with pytest.raises(LayoutError, match="does not divide"):
        Layout.parse(layout).local_shape((6, 16), SIZES)


def test_the_outermost_axis_shards_first() -> None:
    default = Layout.parse("S(0),S(0)")
    swapped = Layout.parse("S(0),S(0);1>0")
    assert default.local_slices((8,), SIZES, (1, 0)) == ((slice(4, 5),),)
    assert swapped.local_slices((8,), SIZES, (1, 0)) == ((slice(1, 2),),)


def test_a_rank_holds_its_slice_of_each_section() -> None:
    layout = Layout.parse("R,S(0)/2+1+1")
    assert layout.local_slices((32,), SIZES, (0, 1)) == (
        (slice(4, 8), slice(18, 20), slice(26, 28)),
    )


def test_an_axis_that_does_not_divide_each_section_is_refused() -> None:
    layout = Layout.parse("R,S(0)/1+1+1")
    assert not layout.is_legal((16,), SIZES)
    assert not layout.is_legal((18,), SIZES)
    assert layout.is_legal((24,), SIZES)
    with pytest.raises(LayoutError, match="does not divide"):
        layout.local_shape((18,), SIZES)


def test_only_the_innermost_axis_can_step() -> None:
    layout = Layout.parse("S(0),S(0)")
    assert layout.replace(1, R) == Layout.parse("S(0),R")
    with pytest.raises(LayoutError, match="not innermost"):
        layout.replace(0, R)


def test_a_dim_is_sharded_further_in_the_same_chunks_only() -> None:
    layout = Layout.parse("S(0)/1+1,R")
    assert layout.replace(1, S(0, (1, 1))) == Layout.parse("S(0)/1+1,S(0)/1+1")
    for axis in (0, 1):
        with pytest.raises(LayoutError, match="different sub-shards"):
            layout.replace(axis, S(0))


def test_a_new_shard_goes_innermost() -> None:
    assert Layout.parse("R,S(0)").replace(0, S(0)) == Layout.parse("S(0),S(0);1>0")
    assert Layout.parse("S(0),R").replace(1, S(0)) == Layout.parse("S(0),S(0)")


@given(layouts(sub_shards=((),)), st.integers(0, 2), st.sampled_from([I, R, P, S(0), S(1)]))
def test_a_step_keeps_the_nesting_of_the_others(layout: Layout, axis: int, new: AxisType) -> None:
    old = layout.types[axis]
    assume(new != old and (not old.is_shard or layout.sharding_axes(old.dim)[-1] == axis))
    after = layout.replace(axis, new)
    for dim in range(2):
        kept = [a for a in layout.sharding_axes(dim) if a != axis]
        expected = [*kept, axis] if new == S(dim) else kept
        assert list(after.sharding_axes(dim)) == expected
    assert Layout.parse(str(after)) == after


@pytest.mark.parametrize(
    ("differentiable", "partial", "count"),
    [(True, True, 5**2 + 2), (False, True, 4**2 + 2), (False, False, 3**2 + 2)],
)
def test_layouts_are_enumerated_once(differentiable: bool, partial: bool, count: int) -> None:
    found = list(legal_layouts(SHAPE, SIZES, differentiable=differentiable, partial=partial))
    assert len(found) == len(set(found)) == count


def test_interleaved_types_are_layouts_where_they_divide() -> None:
    plain = set(legal_layouts((24,), SIZES, differentiable=True))
    found = list(legal_layouts((24,), SIZES, differentiable=True, interleaved=[S(0, (1, 1, 1))]))
    assert len(found) == len(set(found))
    assert {str(x) for x in set(found) - plain if "I" not in str(x) and "P" not in str(x)} == {
        "S(0)/1+1+1,R",
        "R,S(0)/1+1+1",
        "S(0)/1+1+1,S(0)/1+1+1",
        "S(0)/1+1+1,S(0)/1+1+1;1>0",
    }


def test_a_scalar_has_whole_and_partial_layouts_only() -> None:
    assert {str(x) for x in legal_layouts((), (2,), differentiable=True)} == {"I", "R", "P"}


def test_a_mesh_without_axes_has_one_layout() -> None:
    assert list(legal_layouts(SHAPE, (), differentiable=True)) == [Layout(())]


def test_placements_of_plain_layouts() -> None:
    assert placement_texts(Layout.parse("I,S(1)"), SIZES) == ("Replicate()", "Shard(dim=1)")
    assert placement_texts(Layout.parse("R,P"), SIZES) == ("Replicate()", "Partial(sum)")


def test_a_swapped_nesting_is_a_strided_shard() -> None:
    texts = placement_texts(Layout.parse("S(0),S(0);1>0"), SIZES)
    assert texts == ("_StridedShard(dim=0, sf=4)", "Shard(dim=0)")


def test_a_slice_of_each_section_is_a_strided_shard() -> None:
    texts = placement_texts(Layout.parse("I,S(0)/1+1+1"), SIZES)
    assert texts == ("Replicate()", "_StridedShard(dim=0, sf=3)")


@pytest.mark.parametrize("text", ["I,S(0)/2+1", "S(0)/1+1,S(0)/1+1"])
def test_some_sub_shards_have_no_placement(text: str) -> None:
    assert not has_placements(Layout.parse(text))
    with pytest.raises(LayoutError, match="no placement"):
        placement_texts(Layout.parse(text), SIZES)


@given(layouts(sub_shards=((), (1, 1), (1, 1, 1))))
def test_placements_read_back(layout: Layout) -> None:
    assume(has_placements(layout))
    whole_is_r = Layout(tuple(R if t == I else t for t in layout.types), layout.nesting)
    sizes = (2, 3, 4)
    assert layout_of_texts(placement_texts(layout, sizes), sizes, whole=R) == whole_is_r
    whole_is_i = Layout(tuple(I if t == R else t for t in layout.types), layout.nesting)
    assert from_placements(to_placements(layout, sizes), sizes) == whole_is_i


@pytest.mark.parametrize(
    "texts",
    [("Shard(0)", "Replicate()"), ("_StridedShard(dim=0, sf=3)", "Shard(dim=0)"), ("Max()", "R")],
)
def test_placements_that_no_layout_expresses_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError):
        layout_of_texts(texts, SIZES)
