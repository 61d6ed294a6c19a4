"""Topologies: a device type and nested levels of links, with validation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import ConfigDict

from autoshard.base.integers import format_integer
from autoshard.base.quantities import Bandwidth, ByteCount, parse_bytes, parse_rate
from autoshard.errors import InputError, MeshError

_LARGEST = 1e30
"""Largest number of a topology, far above those of any hardware; products of several are finite."""

MAX_NAME = 255
"""Maximum characters of a name."""


def check_positive(value: float, what: str) -> None:
    """Raise MeshError unless a value is a finite number above zero."""
    if not 1 / _LARGEST <= value <= _LARGEST:
        wanted = "a finite number above 0" if value < 1 else f"at most {_LARGEST:g}"
        raise MeshError(f"{what} is {_shown(value)}; it must be {wanted}")


def check_not_negative(value: float, what: str) -> None:
    """Raise MeshError unless a value is a finite number, zero or more."""
    if not 0 <= value <= _LARGEST:
        wanted = f"at most {_LARGEST:g}" if value > 0 else "a finite number, 0 or more"
        raise MeshError(f"{what} is {_shown(value)}; it must be {wanted}")


def _shown(value: float) -> str:
    return format_integer(value) if isinstance(value, int) else str(value)


def read_rate(value: str | float, what: str) -> float:
    """Read a bandwidth; MeshError names it if it cannot be read."""
    try:
        return parse_rate(value)
    except InputError as error:
        raise MeshError(f"{what}: {error}") from None


def _read_strings(owner: object, rates: Iterable[str], amounts: Iterable[str] = ()) -> None:
    """Replace fields of a frozen dataclass that are strings, such as "450GB/s", by numbers."""
    for name in rates:
        if isinstance(value := getattr(owner, name), str):
            object.__setattr__(owner, name, read_rate(value, name))
    for name in amounts:
        if isinstance(value := getattr(owner, name), str):
            try:
                object.__setattr__(owner, name, parse_bytes(value))
            except InputError as error:
                raise MeshError(f"{name}: {error}") from None


def check_name(name: str, what: str) -> None:
    """Raise MeshError if a name is empty, too long, not printable or has surrounding spaces."""
    if len(name) > MAX_NAME:
        raise MeshError(
            f"{what} {name[:32]!r}... must have a name of at most {MAX_NAME} characters"
        )
    if not name.isprintable():
        raise MeshError(f"{what} {name!r} must have a name without control characters")
    if not name or name != name.strip():
        raise MeshError(f"{what} {name!r} must have a name without spaces around it")


def check_unique(names: Iterable[str], what: str) -> None:
    """Raise MeshError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise MeshError(f"{what} {name!r} is named twice; names must differ")
        seen.add(name)


COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "halo_exchange", "reduce_scatter")
"""Names of the collectives of the cost model."""

INNER = " of inner dims"
"""Suffix of an all-gather or reduce-scatter along a dim other than the first, where a copy makes
slices contiguous."""

MEASURABLE = (*COLLECTIVES, f"all_gather{INNER}", f"reduce_scatter{INNER}")
"""Names of the collectives that a link may have a rate for."""

PROTOCOLS = ("LL", "LL128", "Simple")
"""Protocols of NCCL: the first two send flags with the data."""

ALGORITHMS = (
    *(
        f"{shape} {protocol}"
        for shape in ("ring", "tree")
        for protocol in ("LL", "LL128", "Simple")
    ),
    "NVLS",
    "all_to_all",
    "send",
)
"""Names of the algorithms of NCCL that a link may have a rate for, with their protocols."""

_PLAIN = ("ring Simple", "tree Simple", "all_to_all", "send")
"""Algorithms of a link of which only bandwidth and latency are known."""

MAX_LEVELS = 32
"""Maximum number of levels of links of a topology."""

MAX_BENDS = 64
"""Maximum number of bends of a collective."""

BACKENDS = ("nccl", "gloo")
"""Names of the supported `torch.distributed` backends."""

ASSUMED = ("topology", "device")
"""Inputs of a mesh that can be assumed if they are not given."""

MATMUL_EFFICIENCY = 0.8
"""Fraction of the dense peak that large matrix products reach.

Published sweeps over shapes find a little over 0.8 on A100 and H100 (Bekman, "Machine
Learning Engineering", maximum achievable matmul FLOPS).
"""

TILE = 32.0
"""Default extent at which a matrix product loses half of its efficiency.

Kernels pad every extent to tiles. With this value, matrix-vector products are bound by memory, as
they are in practice, and sharding an extent down to a few tiles is clearly more expensive.
"""

ATTENTION_KERNELS = (
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "cudnn_attention",
)
"""Names of the fused attention kernels that a device may have rates for."""

MAX_OPERATORS = 4096
"""Maximum number of operator fits of a device."""

MAX_DTYPES = 64
"""Maximum number of dtypes with a peak; PyTorch has fewer."""

MAX_SOURCE = 4096
"""Maximum characters of the source of a topology."""


@dataclass(frozen=True)
class RooflineFit:
    """Measured time of an operator in one direction: `overhead + times * roofline`.

    Attributes:
        overhead: seconds of overhead of all its kernels together.
        times: factor of the roofline seconds of its operations and bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    overhead: float
    times: float

    def __post_init__(self) -> None:
        check_not_negative(self.overhead, "overhead of an operator")
        check_not_negative(self.times, "times of an operator")


@dataclass(frozen=True)
class OperatorFit:
    """Measured times of an operator, forward and backward."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    forward: RooflineFit
    backward: RooflineFit


@dataclass(frozen=True)
class AttentionRate:
    """FLOP/s of a fused attention kernel in 16-bit types, on long sequences.

    A query that sees `n` keys takes as long as `n + keys` keys at this rate. Operations are
    `4 queries keys head_size` in forward, half of it if causal, and 2.5 times as many in
    backward, which computes the scores again (Dao 2023, section 4.1).

    Attributes:
        head_sizes: head sizes with a known rate, ascending.
        forward: FLOP/s in forward for each of them.
        backward: FLOP/s in backward for each of them.
        keys: keys per query whose time a block of queries takes to start and to end.
        causal: fraction of the rate that is left with a causal mask.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    head_sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    keys: float
    causal: float = 1.0

    def __post_init__(self) -> None:
        sizes = self.head_sizes
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise MeshError("head_sizes of attention must be positive and ascending")
        if not len(sizes) == len(self.forward) == len(self.backward):
            raise MeshError("attention needs a forward and a backward rate for each head size")
        for rate in (*self.forward, *self.backward):
            check_positive(rate, "rate of attention")
        check_not_negative(self.keys, "keys of attention")
        _check_fraction(self.causal, "causal of attention")


@dataclass(frozen=True)
class KernelRates:
    """Rates of a GPU's kernels, as its libraries of linear algebra and attention reach them.

    Attributes:
        multiprocessors: number of streaming multiprocessors; each computes one tile of a product
            at a time.
        matmul: fraction of the peak that a long series of large products reaches, by PyTorch's
            dtype name; that of bfloat16 for others.
        memory: fraction of the memory bandwidth that streams reach.
        exposed_writes: fraction of the time to write a product that does not overlap with
            computing the next tile; 0 where accumulators have a memory of their own.
        attention: fused attention kernels by name (`ATTENTION_KERNELS`), the default first.
        dispatch: seconds in which the host runs one operator in eager mode.
        power: watts at which the fractions were reached.
        clock: fraction of the clock that the power limit leaves.
        eager: fraction of the speed of streams that eager mode reaches in a training step. Its
            kernels of normalisations and biases read gradients again, those of activations such
            as GELU are bound by arithmetic, and autograd copies and adds gradients.
        contention: fraction of the seconds of an overlapped collective that concurrent compute
            loses: the collective holds multiprocessors and memory bandwidth, and copies into and
            out of its buffers.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    multiprocessors: int
    matmul: Mapping[str, float] = field(hash=False)
    memory: float
    exposed_writes: float
    attention: Mapping[str, AttentionRate] = field(hash=False)
    dispatch: float
    power: float
    clock: float = 1.0
    eager: float = 1.0
    contention: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self.multiprocessors, "multiprocessors of kernels")
        for dtype, fraction in self.matmul.items():
            _check_fraction(fraction, f"matmul[{dtype!r}] of kernels")
        if "bfloat16" not in self.matmul:
            raise MeshError("kernels have no matmul fraction for bfloat16, which stands in for all")
        _check_fraction(self.memory, "memory of kernels")
        check_not_negative(self.exposed_writes, "exposed_writes of kernels")
        for name in self.attention:
            if name not in ATTENTION_KERNELS:
                known = ", ".join(ATTENTION_KERNELS)
                raise MeshError(f"attention kernel {name!r} is unknown; choose one of {known}")
        check_not_negative(self.dispatch, "dispatch of kernels")
        check_positive(self.power, "power of kernels")
        _check_fraction(self.clock, "clock of kernels")
        _check_fraction(self.eager, "eager of kernels")
        if self.contention:
            _check_fraction(self.contention, "contention of kernels")

    def matmul_efficiency(self, dtype: str) -> float:
        """Fraction of the peak of a dtype that large products reach, at the device's clock."""
        return self.clock * self.matmul.get(dtype, self.matmul["bfloat16"])


def _check_fraction(value: float, what: str) -> None:
    check_positive(value, what)
    if value > 1:
        raise MeshError(f"{what} is {value}; it must be at most 1")


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU host that runs one rank.

    Attributes:
        name: display name.
        peak_flops: dense peak in FLOP/s by PyTorch's dtype name; float32 must be among them.
        memory_bandwidth: bytes per second, reads and writes together.
        memory: bytes.
        launch_overhead: minimum seconds of a kernel.
        tile: extent at which a matrix product loses half of its efficiency.
        host_bandwidth: bytes per second at which inputs of a step arrive from the host, if
            the step waits for them; 0 if they are on the device already, as after a loader that
            copies ahead.
        operators: measured times of operators, by name, and of other operators by category
            (`view`, `contraction`, `stream`). Without either, an operator takes the launch overhead
            of each kernel plus the roofline seconds, and a view is free.
        kernels: rates of its kernels, which replace `tile` and the fixed efficiency of products;
            None if unknown.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: Bandwidth
    memory: ByteCount
    launch_overhead: float = 0.0
    tile: float = TILE
    host_bandwidth: Bandwidth = 0.0
    operators: Mapping[str, OperatorFit] = field(default_factory=dict, hash=False)
    kernels: KernelRates | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "device")
        _read_strings(self, ("memory_bandwidth", "host_bandwidth"), ("memory",))
        if "float32" not in self.peak_flops:
            raise MeshError(
                f"device {self.name!r} has no peak_flops for float32, which stands in "
                "for every dtype that is not listed"
            )
        if len(self.peak_flops) > MAX_DTYPES:
            raise MeshError(
                f"device {self.name!r} has peak_flops for {len(self.peak_flops)} dtypes; "
                f"the limit is {MAX_DTYPES}"
            )
        for dtype, flops in self.peak_flops.items():
            check_name(dtype, f"dtype of device {self.name!r}")
            check_positive(flops, f"peak_flops[{dtype!r}] of device {self.name!r}")
        check_positive(self.memory_bandwidth, f"memory_bandwidth of device {self.name!r}")
        check_positive(self.memory, f"memory of device {self.name!r}")
        check_not_negative(self.launch_overhead, f"launch_overhead of device {self.name!r}")
        check_not_negative(self.tile, f"tile of device {self.name!r}")
        check_not_negative(self.host_bandwidth, f"host_bandwidth of device {self.name!r}")
        if len(self.operators) > MAX_OPERATORS:
            raise MeshError(
                f"device {self.name!r} has fits of {len(self.operators)} operators; "
                f"the limit is {MAX_OPERATORS}"
            )
        for operator in self.operators:
            check_name(operator, f"operator of device {self.name!r}")

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype; that of float32 if the dtype is not listed."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    @property
    def stream_bandwidth(self) -> float:
        """Bytes per second that kernels reach which only move bytes."""
        return self.memory_bandwidth * (self.kernels.memory if self.kernels else 1.0)

    @property
    def eager_bandwidth(self) -> float:
        """Bytes per second that streams of eager mode reach."""
        return self.stream_bandwidth * (self.kernels.eager if self.kernels else 1.0)

    @property
    def contention(self) -> float:
        """Fraction of overlapped seconds by which compute takes longer."""
        return self.kernels.contention if self.kernels else 0.0

    @property
    def input_bandwidth(self) -> float:
        """ByteCount per second at which inputs of a step are written to memory."""
        return min(self.memory_bandwidth, self.host_bandwidth or self.memory_bandwidth)


@dataclass(frozen=True)
class Bend:
    """Message size from which a collective is slower, for example because of cache sizes.

    Attributes:
        nbytes: size of a rank's tensor in bytes.
        bandwidth: bytes per second of all bytes beyond `nbytes`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    nbytes: ByteCount
    bandwidth: Bandwidth

    def __post_init__(self) -> None:
        _read_strings(self, ("bandwidth",), ("nbytes",))
        check_positive(self.nbytes, "nbytes of a bend")
        check_positive(self.bandwidth, "bandwidth of a bend")


@dataclass(frozen=True)
class Rate:
    """Bandwidth and latency of a collective over a link.

    Attributes:
        bandwidth: bytes per second per device and direction (full duplex).
        latency: seconds per step of the collective.
        bends: sizes from which it is slower, ascending.
        overhead: fixed seconds of an algorithm of NCCL if no link further outside is crossed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    bandwidth: Bandwidth
    latency: float = 0.0
    bends: tuple[Bend, ...] = ()
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _read_strings(self, ("bandwidth",))
        check_positive(self.bandwidth, "bandwidth of a collective")
        check_not_negative(self.latency, "latency of a collective")
        check_not_negative(self.overhead, "overhead of a collective")
        if len(self.bends) > MAX_BENDS:
            raise MeshError(f"a collective has {len(self.bends)} bends; the limit is {MAX_BENDS}")
        for before, after in pairwise((Bend(1, self.bandwidth), *self.bends)):
            if after.nbytes <= before.nbytes or after.bandwidth > before.bandwidth:
                raise MeshError(
                    "the bends of a collective must have ascending nbytes and descending bandwidths"
                )


@dataclass(frozen=True)
class Link:
    """One level of links, which connect the devices of a group.

    Attributes:
        name: display name.
        size: devices in a group at this level; None if unlimited.
        bandwidth: bytes per second per device and direction (full duplex).
        latency: seconds per step of a collective.
        collectives: measured rates of collectives by name (`MEASURABLE`), which replace
            bandwidth and latency.
        algorithms: rates of NCCL's algorithms by name (`ALGORITHMS`), for collectives that were not
            measured. Without any, each has bandwidth and latency, as protocol Simple.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    size: int | None
    bandwidth: Bandwidth
    latency: float = 0.0
    collectives: Mapping[str, Rate] = field(default_factory=dict, hash=False)
    algorithms: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name(self.name, "link")
        _read_strings(self, ("bandwidth",))
        for names, known, what in (
            (self.collectives, MEASURABLE, "a collective"),
            (self.algorithms, ALGORITHMS, "an algorithm"),
        ):
            for name in names:
                if name not in known:
                    raise MeshError(f"{name!r} is not {what}; choose one of {', '.join(known)}")
        if self.size is not None and self.size < 1:
            raise MeshError(
                f"link {self.name!r} has size {format_integer(self.size)}; it must be 1 or more"
            )
        check_positive(self.bandwidth, f"bandwidth of link {self.name!r}")
        check_not_negative(self.latency, f"latency of link {self.name!r}")

    def measured(self, action: str) -> Rate | None:
        """Measured rate of a collective over the link; None if there is none."""
        return self.collectives.get(action) or self.collectives.get(action.removesuffix(INNER))

    def rate(self, action: str) -> Rate:
        """Rate of a collective over the link."""
        return self.measured(action) or Rate(self.bandwidth, self.latency)

    @property
    def send(self) -> Rate:
        """Rate of a message from one device to another over the link."""
        return self.measured("halo_exchange") or self.algorithm("send") or self.rate("send")

    def algorithm(self, name: str) -> Rate | None:
        """Rate of an algorithm of NCCL over the link; None if the link does not have it."""
        if self.algorithms:
            return self.algorithms.get(name)
        return Rate(self.bandwidth, self.latency) if name in _PLAIN else None


@dataclass(frozen=True)
class Topology:
    """A cluster: identical devices with nested levels of links.

    Device i is in group i // size of each level, so the devices of a group have consecutive
    numbers.

    Attributes:
        name: display name.
        device: the device type of every rank.
        levels: links from the innermost to the outermost; only the last may be unlimited.
        backend: the `torch.distributed` backend that the links are described for.
        collective_overhead: fixed seconds of every collective.
        source: source of the figures.
        assumed: what was not given but assumed: the whole topology, or the device; None if nothing
            was. It has no effect on costs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    device: Device
    levels: tuple[Link, ...]
    backend: str = "nccl"
    collective_overhead: float = 0.0
    source: str = ""
    assumed: Literal["topology", "device"] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name, "topology")
        if len(self.source) > MAX_SOURCE:
            raise MeshError(
                f"the source of topology {self.name!r} has {len(self.source):,} characters; "
                f"the limit is {MAX_SOURCE:,}; give an address instead"
            )
        check_backend(self.backend)
        if self.assumed not in (None, *ASSUMED):
            raise MeshError(f"assumed is {self.assumed!r}; it must be one of {ASSUMED} or None")
        check_not_negative(
            self.collective_overhead, f"collective_overhead of topology {self.name!r}"
        )
        if not self.levels:
            raise MeshError(f"topology {self.name!r} has no levels; give at least one link")
        if len(self.levels) > MAX_LEVELS:
            raise MeshError(
                f"topology {self.name!r} has {len(self.levels):,} levels; the limit is {MAX_LEVELS}"
            )
        check_unique((link.name for link in self.levels), "link")
        for inner, outer in pairwise(self.levels):
            _check_nested(inner, outer)

    @property
    def max_devices(self) -> int | None:
        """Maximum number of devices of the topology; None if unlimited."""
        return self.levels[-1].size

    @property
    def devices_per_node(self) -> int | None:
        """Number of devices that the innermost links connect; None if they connect all."""
        return self.levels[0].size


def check_collective(action: str) -> None:
    """Raise MeshError for an unknown collective."""
    if action not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise MeshError(f"'{action}' is not a collective; choose one of {known}")


def check_backend(backend: str) -> None:
    """Raise MeshError for an unknown backend."""
    if backend not in BACKENDS:
        raise MeshError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")


def _check_nested(inner: Link, outer: Link) -> None:
    if inner.size is None:
        raise MeshError(
            f"link {inner.name!r} has no size, so link {outer.name!r} can never be crossed; "
            "only the outermost level may be unlimited"
        )
    if outer.size is not None and (outer.size <= inner.size or outer.size % inner.size):
        raise MeshError(
            f"link {outer.name!r} groups {format_integer(outer.size)} devices, which is not a "
            f"larger multiple of the {format_integer(inner.size)} of link {inner.name!r} inside it"
        )
