"""Budgets of groups of entries that share one cache."""

from collections.abc import Mapping


def group_limits(
    sizes: Mapping[str, int], max_bytes: int | None, max_group_bytes: int | None = None
) -> dict[str, int]:
    """The groups that must give up entries, and the bytes that each of them may keep.

    No group may keep more than its own budget. If all together still have too much, the shares
    are max-min fair: the largest groups shrink to one equal size, and those below it keep
    everything. So whoever adds the most loses entries first, and cannot evict those of others.

    Args:
        sizes: bytes of each group.
        max_bytes: budget for all groups together; None for no limit.
        max_group_bytes: budget for each group; None for no limit.
    """
    kept = {
        group: size if max_group_bytes is None else min(size, max_group_bytes)
        for group, size in sizes.items()
    }
    if max_bytes is not None:
        left = max_bytes
        for done, (group, size) in enumerate(sorted(kept.items(), key=lambda item: item[1])):
            kept[group] = min(size, left // (len(kept) - done))
            left -= kept[group]
    return {group: limit for group, limit in kept.items() if limit < sizes[group]}
