"""A model at any batch size and sequence length, exported as seldom as possible."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from autoshard.errors import GraphError, OptionError
from autoshard.graph import (
    Graph,
    GraphLike,
    InputKind,
    MixedPrecision,
    is_graph_file,
    resized,
    to_graph,
    with_dynamic_batch,
)
from autoshard.plan import Mode
from autoshard.requests.model_configs import BatchShape


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and types that the graph of a model depends on.

    Attributes:
        batch_size: samples of a step, or of a micro-batch, of all devices together; that of the
            graph, or the default of a config, if None.
        seq_length: tokens of each sample; in the same way.
        mixed_precision: policy of the export; None for none.
    """

    batch_size: int | None = None
    seq_length: int | None = None
    mixed_precision: MixedPrecision | None = None


@dataclass
class ResizableModel:
    """A model whose graph is asked for at several sizes.

    A config is exported with two batch sizes, which tell how its numbers depend on it; the batch
    size of a function's model is a dynamic size of its export. Another sequence length is another
    export.

    Attributes:
        source: a graph, or what one is loaded from; or a text that names a model, as for
            `export_named`.
        mode: training or inference; of a config, whether its graph has a loss.
    """

    source: GraphLike
    mode: Mode
    _graphs: dict[Sizes, Graph] = field(default_factory=dict)

    @property
    def is_named(self) -> bool:
        """True for a model that is exported here, False for a graph."""
        return isinstance(self.source, str) and not is_graph_file(self.source)

    def graph(self, sizes: Sizes, *, any_batch_size: bool = False) -> Graph:
        """The graph at some sizes.

        Args:
            sizes: the sizes.
            any_batch_size: True if other batch sizes will be asked for too.

        Raises:
            GraphError: the model cannot be exported, or not at these sizes.
            OptionError: it has other sizes, and is no model that is exported here.
        """
        if sizes not in self._graphs:
            self._graphs[sizes] = self._made(sizes, any_batch_size=any_batch_size)
        return self._graphs[sizes]

    def _made(self, sizes: Sizes, *, any_batch_size: bool) -> Graph:
        if not self.is_named:
            return self._resized_file(sizes)
        for known, graph in self._graphs.items():
            if replace(known, batch_size=sizes.batch_size) == sizes and sizes.batch_size:
                symbol = size_symbol(graph, 0)
                if symbol and graph.dynamic and graph.dynamic.supports({symbol: sizes.batch_size}):
                    return resized(graph, {symbol: sizes.batch_size})
        made = self._exported(sizes, any_batch_size=any_batch_size)
        if any_batch_size and made.dynamic is None:
            for known, graph in self._graphs.items():
                if replace(known, batch_size=sizes.batch_size) == sizes:
                    # Otherwise each batch size is exported.
                    with suppress(GraphError):
                        return with_dynamic_batch(made, graph)
        return made

    def _resized_file(self, sizes: Sizes) -> Graph:
        """The graph of a file at other sizes, if its export left them dynamic."""
        if sizes.mixed_precision is not None:
            raise OptionError(
                "mixed_precision is part of an export: give a config.json, or export again with "
                "export_model(..., mixed_precision=...)"
            )
        graph = self._graphs.setdefault(Sizes(), to_graph(self.source))
        wanted: dict[str, int] = {}
        for dim, name, size in (
            (0, "batch_size", sizes.batch_size),
            (1, "seq_length", sizes.seq_length),
        ):
            if size is None or size == exported_size(graph, dim):
                continue
            symbol = size_symbol(graph, dim)
            if symbol is None:
                raise OptionError(
                    f"{name} {size}: the graph was exported with {exported_size(graph, dim)}; "
                    "export it with dynamic_shapes for this dim, or give a config.json"
                )
            wanted[symbol] = size
        return resized(graph, wanted)

    def _exported(self, sizes: Sizes, *, any_batch_size: bool) -> Graph:
        # torch is imported only for a model that is exported here.
        from autoshard.requests.model_files import export_named  # noqa: PLC0415

        given = {"batch_size": sizes.batch_size, "seq_length": sizes.seq_length}
        shape = {name: size for name, size in given.items() if size is not None}
        archive = export_named(
            str(self.source),
            BatchShape(**shape) if shape else None,
            mode=self.mode,
            mixed_precision=sizes.mixed_precision,
            any_batch_size=any_batch_size and ".py:" in str(self.source),
        )
        return to_graph(archive)


def exported_size(graph: Graph, dim: int) -> int | None:
    """The size of a dim of the batch: 0 for samples, 1 for tokens; None if it has no such dim."""
    shapes = (graph.values[i.name].shape for i in graph.inputs if i.kind is InputKind.USER)
    shape = next((shape for shape in shapes if shape), ())
    return shape[dim] if dim < len(shape) else None


def size_symbol(graph: Graph, dim: int) -> str | None:
    """The dynamic size of a dim of the batch; None if it is fixed."""
    if graph.dynamic is None:
        return None
    given = (i.name for i in graph.inputs if i.kind is InputKind.USER)
    found = (graph.dynamic.symbols_of(name).get(dim) for name in given)
    return next((symbol for symbol in found if symbol is not None), None)
