"""The timeline of a plan: what runs when on which lane, and what is held meanwhile."""

from autoshard.plan.simulation.chrome_trace import chrome_trace
from autoshard.plan.simulation.events import Event, Simulation, resharding_label
from autoshard.plan.simulation.simulate import simulate

__all__ = ["Event", "Simulation", "chrome_trace", "resharding_label", "simulate"]
