"""What a rank runs, as it is written down: instructions, and the slots that they read and make."""

from typing import NamedTuple

from autoshard.ops import Strides
from autoshard.plan.document import Use
from autoshard.plan.memory.recompute import Keeps

Shape = tuple[int, ...]


class Form(NamedTuple):
    """How a tensor looks on one rank.

    Attributes:
        nbytes: bytes of its elements.
        gradient: whether it needs one.
        shape: local shape.
        strides: in elements; None where contiguous.
    """

    nbytes: int
    gradient: bool
    shape: Shape
    strides: Strides


class Instruction(NamedTuple):
    """One thing that a rank does: an operator, or a resharding.

    Attributes:
        name: of the node, or of the value that is resharded.
        reads: slots that it takes.
        targets: slots that it makes.
        kept: the slots among them that autograd keeps.
        kept_bytes: what autograd keeps beside them.
        working: bytes beside what it reads and makes while it runs forward.
        working_backward: bytes beside gradients while its backward runs.
        passes_gradient: for each read whether its gradient is that of the target.
        use: what a resharding is for; None of an operator, and of the end of a bucket.
        uses: what it makes its first targets for, if it is a resharding.
        regather: whether backward reshards once more.
        checkpoint: number of the checkpoint that it belongs to; -1 for none.
        bucket: number of the bucket whose collectives it shares; -1 for none.
    """

    name: str
    reads: tuple[int, ...]
    targets: tuple[int, ...]
    kept: tuple[int, ...]
    kept_bytes: int
    working: int
    working_backward: int
    passes_gradient: tuple[bool, ...]
    use: Use | None = None
    uses: tuple[Use, ...] = ()
    regather: bool = False
    checkpoint: int = -1
    bucket: int = -1

    @property
    def is_resharding(self) -> bool:
        """Whether it is one."""
        return bool(self.uses)

    @property
    def keeps(self) -> Keeps:
        """What autograd keeps of it."""
        if self.kept_bytes or not set(self.kept).isdisjoint(self.targets):
            return Keeps.MADE
        return Keeps.READ if self.kept else Keeps.NOTHING


class Record:
    """Instructions as they are added, and the slots between them.

    Attributes:
        forms: of every slot.
        numbers: of each slot's form; equal forms have the same.
        storages: number of the memory in which each slot lies; views share it.
        instructions: in the order in which they run.
        made_by: for each storage the instruction that makes it; -1 for inputs.
    """

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self.numbers: list[int] = []
        self.storages: list[int] = []
        self.instructions: list[Instruction] = []
        self.made_by: list[int] = []
        self._known: dict[Form, int] = {}

    def add_slot(self, storage: int, form: Form, number: int | None = None) -> int:
        """A new slot; the number of its form may be given where it is known."""
        self.forms.append(form)
        self.storages.append(storage)
        self.numbers.append(self.number(form) if number is None else number)
        return len(self.forms) - 1

    def number(self, form: Form) -> int:
        """The number of a form."""
        return self._known.setdefault(form, len(self._known))

    def add_storage(self) -> int:
        """New memory, of what the next instruction makes."""
        return self._add_storage(len(self.instructions))

    def add_input(self, form: Form) -> int:
        """A slot of what is there from the start."""
        return self.add_slot(self._add_storage(-1), form)

    def _add_storage(self, maker: int) -> int:
        self.made_by.append(maker)
        return len(self.made_by) - 1
