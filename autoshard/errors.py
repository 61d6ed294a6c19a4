"""Errors of autoshard.

    AutoshardError
    ├── InputError                  invalid input; also a ValueError
    │   ├── GraphError              the exported graph
    │   │   ├── ArchiveError        not a readable .pt2 archive
    │   │   ├── ExportError         torch.export cannot trace the model
    │   │   ├── SchemaError         model.json is not a supported program
    │   │   └── UnsupportedError    a program feature or operator without a rule
    │   ├── LayoutError             an invalid layout, or one that cannot be resharded to
    │   ├── MeshError               mesh, topology or bandwidths
    │   ├── OptionError             options that are not allowed, or contradict others or the graph
    │   ├── ProblemError            an optimization problem that is malformed
    │   ├── PlanError               a plan document that does not fit its graph, mesh or model
    │   ├── CheckpointError         weights in files that cannot be read, or do not fit the model
    │   ├── ArgumentTypeError       an argument of the wrong type; also a TypeError
    │   └── UnknownNameError        a name that the plan does not have; also a KeyError
    ├── MissingPackageError         an optional package is not installed; also an ImportError
    ├── TorchVersionError           a PyTorch that lacks what the runtime relies on
    ├── LaunchError                 a rank of a launched program failed
    └── ServiceError                a request to the planning service failed
        ├── ServiceUnavailableError no response, or one that asks to try again later
        └── RequestRejectedError    the service refused the request; carries its problem details

An outcome of planning (infeasible, timed out, cancelled) is a value of
`autoshard.SolveStatus`, not an error. Anything else that is raised is a bug.
"""

from collections.abc import Mapping
from typing import Any


class AutoshardError(Exception):
    """Base of all errors that autoshard raises."""


class InputError(AutoshardError, ValueError):
    """The input is invalid; the message names the fault and a remedy."""


class GraphError(InputError):
    """The exported graph cannot be planned."""


class ArchiveError(GraphError):
    """The bytes are not a readable `.pt2` archive.

    Attributes:
        limit: field of `autoshard.graph.ArchiveLimits` that the archive exceeds; empty if none.
    """

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


class ExportError(GraphError):
    """The model cannot be exported; the message has the module, file and line, and a remedy.

    Attributes:
        module: name of the module where tracing failed; empty if it is the model itself.
    """

    def __init__(self, message: str, module: str = "") -> None:
        super().__init__(message)
        self.module = module


class SchemaError(GraphError):
    """The archive's `model.json` is not an exported program of a supported schema."""


class UnsupportedError(GraphError):
    """The program uses a feature or an operator that has no rule."""


class LayoutError(InputError):
    """A layout is invalid for its tensor, or cannot be resharded as requested."""


class MeshError(InputError):
    """A mesh, a topology or a bandwidth is invalid."""


class OptionError(InputError):
    """An option has a value that is not allowed, or contradicts others or the graph."""


class TooManyStrategiesError(OptionError):
    """The options, the graph and the mesh have more strategies than are allowed."""


class ProblemError(InputError):
    """An optimization problem is malformed."""


class PlanError(InputError):
    """A plan does not fit its schema, its graph, its mesh or its model."""


class CheckpointError(InputError):
    """Weights in files cannot be read or written, or do not fit the model."""


class MissingPackageError(AutoshardError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


class TorchVersionError(AutoshardError):
    """The installed PyTorch lacks what the library needs; the message names versions that work."""


class ArgumentTypeError(InputError, TypeError):
    """An argument has the wrong type; the message says what to pass."""


class UnknownNameError(InputError, KeyError):
    """A plan has no tensor of this name; the message names similar ones."""

    # That of KeyError quotes the message.
    __str__ = Exception.__str__


class LaunchError(AutoshardError):
    """A rank of a launched program failed; the message names it and has its traceback.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ServiceError(AutoshardError):
    """A request to the planning service failed."""


class ServiceUnavailableError(ServiceError):
    """The service did not answer, or asked to try again later.

    Attributes:
        retry_after: seconds to wait, from the service's `Retry-After`; None without it.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestRejectedError(ServiceError):
    """The service refused the request.

    Attributes:
        status: HTTP status code.
        problem: the RFC 9457 problem details that the service sent.
    """

    def __init__(self, message: str, *, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.problem = dict(problem)
