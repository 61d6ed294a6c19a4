"""Wide problems: few of many strategies matter, and bounds tell which."""

from autoshard.solve.narrowing.search import solve_narrowed

__all__ = ["solve_narrowed"]
