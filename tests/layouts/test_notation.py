"""Layouts in DTensor's words, and the legend of the short notation."""

from autoshard.layouts import Layout, layout_words, legend, text_words, texts_words


def test_layouts_are_in_the_words_of_dtensor() -> None:
    assert layout_words(Layout.parse("S(0),R,P,I")) == "Shard(0), Replicate, Partial, Replicate"
    assert layout_words(Layout.parse("S(1)/1+1+1")) == "_StridedShard(1, split_factor=3)"
    assert layout_words(Layout.parse("S(1)/4+1+1")) == "Shard(1) of each section 4+1+1"
    assert layout_words(Layout.parse("S(0),S(0);1>0")) == "Shard(0), Shard(0) (axis 1 then axis 0)"


def test_every_layout_of_a_strategy_is_put_in_words() -> None:
    assert text_words("S(0) R -> S(0)") == "Shard(0) Replicate -> Shard(0)"
    assert text_words("S(0),R R,R -> P,R") == (
        "(Shard(0), Replicate) (Replicate, Replicate) -> (Partial, Replicate)"
    )
    assert text_words("S(0),R", notation="short") == "S(0), R"


def test_gradients_are_named_where_texts_would_be_equal() -> None:
    assert texts_words(["I", "S(0)"]) == ["Replicate", "Shard(0)"]
    assert texts_words(["I", "R"]) == ["Replicate", "Replicate (gradient Partial)"]


def test_the_legend_has_the_symbols_that_occur() -> None:
    assert legend(["S(0),I"]).startswith("I = Replicate")
    for symbol, text in {"R": "R,R", "P": "P", "/": "S(0)/1+1+1", ";": "S(0),S(0);1>0"}.items():
        assert symbol in legend([text]).replace("S(d)", "")
    assert "P =" not in legend(["S(0),I"])
