"""The independent checker: it shares rules and prices with the planner, not decisions."""
