import numpy as np

from autoshard.outcome import SolveStatus
from autoshard.solve import Edge, Node, Problem, brute_force, solve_problem
from autoshard.solve.network import Network
from autoshard.solve.relink import best_between


def layered(num_layers: int, limit: float) -> Problem:
    """Equal layers in a chain: strategy 0 is cheap and large, 1 dear and small."""
    nodes = tuple(
        Node(np.array([1.0, 2.0]), np.array([3.0, 1.0]), (0, 1)) for _ in range(num_layers)
    )
    step = np.array([[0.0, 0.25], [0.25, 0.0]])
    index = np.arange(2)
    edges = tuple(Edge(v, v + 1, step, index, index) for v in range(num_layers - 1))
    return Problem(nodes, edges, usage_limit=limit)


def test_the_mix_fills_the_room_to_within_one_layer() -> None:
    network = Network.from_problem(layered(10, 21.0))
    large, small = dict.fromkeys(range(10), 0), dict.fromkeys(range(10), 1)
    mixed = best_between(network, large, small, check=lambda: None)
    assert mixed is not None
    assert list(mixed.values()) == [1] * 5 + [0] * 5
    assert network.price(mixed) == 15.25


def test_nothing_on_the_way_fits() -> None:
    network = Network.from_problem(layered(4, 3.0))
    large, small = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 1)
    assert best_between(network, large, small, check=lambda: None) is None


def test_equal_layers_under_a_tight_limit_are_solved() -> None:
    problem = layered(12, 25.0)
    found, truth = solve_problem(problem), brute_force(problem)
    assert found.status is SolveStatus.OPTIMAL
    assert found.objective == truth.objective
