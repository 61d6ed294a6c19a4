"""Index letters that an axis shards, and how sharding passes through an operator."""

from collections.abc import Collection

from autoshard.ops import Dims, OperatorRule


def outermost_letters(rule: OperatorRule, dims: Dims) -> dict[int, str]:
    """For each dim, the letter that is sharded first."""
    found = {}
    for dim, letters in enumerate(dims):
        letter = next((x for x in letters if rule.sizes[x] > 1), None)
        if letter is not None:
            found[dim] = letter
    return found


def propagated_letters(rule: OperatorRule, letters: Collection[str]) -> set[str]:
    """The output letters that are sharded if these letters are, including split and merged ones."""
    kept = set(letters) - rule.whole - rule.contracted
    for letter, pieces in rule.pieces.items():
        named = {piece for _, piece in pieces if piece}
        if letter in letters:
            kept |= named
        elif named <= set(letters):
            kept.add(letter)
    return kept
