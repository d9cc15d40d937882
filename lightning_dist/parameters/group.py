"""Define the interface of a parameter group, which manages the parameters of one unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.model.units import Unit
from lightning_dist.parameters.gradient_observer import GradientObserver
from lightning_dist.parameters.gradient_reducer import GradientReducer

__all__ = ["MAX_BYTES_UNDER_WAY", "ParameterGroup", "gather_in_turn"]

MAX_BYTES_UNDER_WAY = 32 * 2**20
"""Number of bytes from which no further exchange of parameters or gradients begins before earlier ones have ended.

They need memory besides that of the parameters and gradients.
"""


class ParameterGroup(ABC):
    """Manage the parameters of a unit: those that its modules hold in a step, and those that the optimizer sees.

    Methods that are not abstract are implemented here for a group whose gathered parameters share their memory with the
    parameters that the optimizer sees.
    """

    unit: Unit
    """The unit; set when the module is built."""

    owners: list[nn.Module]
    """The modules that hold the parameters, in the same order on all ranks; set when the module is built."""

    reducer: GradientReducer | None = None
    """Object that averages the gradients over ``dp_replicate``; None: an all-reduce averages them."""

    observer: GradientObserver | None = None
    """What looks at this rank's gradients before they are averaged; None: nothing."""

    is_gathered_for_step = False
    """Whether the parameters are gathered from the beginning of a step to the end of its backward."""

    steps_in_backward = False
    """Whether an optimizer updates the parameters while the backward runs, and frees their gradients."""

    on_change: Callable[[ParameterGroup, Sequence[str]], None] = staticmethod(lambda group, names: None)
    """Function that :meth:`write_back` calls with the group and the names of parameters that a step has changed."""

    _syncs_gradients = True

    @property
    @abstractmethod
    def params(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer sees."""

    @property
    @abstractmethod
    def mesh(self) -> DeviceMesh:
        """Return the mesh whose ranks have different parts of a batch, and reduce the gradients of the group."""

    @property
    @abstractmethod
    def is_gathered(self) -> bool:
        """Return whether the modules hold the gathered parameters now."""

    @abstractmethod
    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` is one of the gathered parameters."""

    @abstractmethod
    def gather(self) -> None:
        """Put the gathered parameters into the modules. This is a collective if the parameters are sharded now."""

    def begin_gather(self) -> None:
        """Begin what :meth:`gather` does, without waiting for other ranks, if that is possible."""
        return

    @abstractmethod
    def free(self) -> None:
        """Put the parameters that the optimizer sees back into the modules."""

    @abstractmethod
    def copy_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the parameters that the optimizer sees to the gathered ones."""

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether gradients are reduced after a backward, or added up on each rank (accumulation)."""
        self._syncs_gradients = enabled

    @property
    def syncs_gradients(self) -> bool:
        """Return whether gradients are reduced after a backward (see :meth:`set_gradient_sync`)."""
        return self._syncs_gradients

    @property
    def needs_gather(self) -> bool:
        """Return whether modules can compute only after :meth:`gather`."""
        return True

    @property
    def is_sharded(self) -> bool:
        """Return whether a rank holds only a part of each parameter, so that gathering them is a collective."""
        return False

    @property
    def is_freed_after_forward(self) -> bool:
        """Return whether gathered parameters are freed after a forward of the unit, and gathered for its backward."""
        return False

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of the gathered parameters, if they are not in the memory of those that optimizers see."""
        return 0

    @property
    def names(self) -> list[str]:
        """Return the full names of the parameters in the user's module."""
        return []

    @property
    def gathered(self) -> list[Tensor]:
        """Return the gathered parameters as plain tensors: this rank's part of those that are split over ``tp``."""
        return []

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole parameters."""
        return sum(param.numel() for param in self.params)

    def copies(self) -> Iterable[tuple[str, nn.Parameter, nn.Parameter]]:
        """Return the name, the gathered form and the form that the optimizer sees of each gathered parameter.

        It is empty for a group whose modules hold in a step what the optimizer sees.
        """
        return ()

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which nothing frees the gathered parameters, even if the module is moved to a device."""
        return nullcontext()

    def after_forward(self) -> None:
        """Act after the forward of a block; FSDP2 itself frees the parameters of sharded groups then."""
        return

    def kept_after_forward(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are not freed after a forward."""
        return nullcontext()

    def in_full_precision(self) -> AbstractContextManager[None]:
        """Return a context in which no parameter is gathered in fewer bytes than those that a step computes with."""
        return nullcontext()

    def whole_state_dict(self) -> AbstractContextManager[None]:
        """Return a context in which ``state_dict()`` of a module returns the gathered parameters."""
        return nullcontext()

    def drop_cleared(self) -> None:
        """Drop the unreduced gradients that the step has cleared since :meth:`watch_unreduced`."""
        return

    def drop_unreduced(self, params: Collection[nn.Parameter] | None = None) -> None:
        """Drop gradients that backwards left unreduced on the gathered parameters.

        Args:
            params: The parameters whose gradients are dropped; None: all.
        """
        return

    def watch_unreduced(self) -> None:
        """Begin to detect whether the step clears gradients that a backward, even a failed one, left unreduced."""
        return

    # The following methods are for the audit of the first step.

    def write_back(self) -> None:
        """Write a step's changes of the gathered parameters into those that the optimizer sees.

        :attr:`on_change` is called before the parameters are freed, with the names of those that the step has changed
        other than through ``param.data``. These names are the same on all ranks.
        """
        return

    def unwritten(self) -> list[str]:
        """Return the names of gathered parameters whose values differ from those that the optimizer sees."""
        return []

    def lost_hooks(self) -> list[str]:
        """Return the names of parameters with tensor hooks that their gathered copies do not have."""
        return []

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters whose gradient was left on their gathered copies."""
        return []

    def is_used(self, param: nn.Parameter) -> bool:
        """Return whether the last backward has given ``param`` a gradient on this rank."""
        return True

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters that got a gradient in this rank's last backward, but have no reduced one."""
        return []


def gather_in_turn(groups: Sequence[ParameterGroup]) -> Iterator[ParameterGroup]:
    """Gather the parameters of ``groups`` and yield each group when it is gathered. This is a collective.

    Ranks wait for each other less often than if each group's gather began after the one before has ended.
    """
    num_begun = num_bytes = 0
    for index, group in enumerate(groups):
        while num_begun < len(groups) and (num_begun == index or num_bytes < MAX_BYTES_UNDER_WAY):
            groups[num_begun].begin_gather()
            num_bytes += groups[num_begun].gathered_bytes
            num_begun += 1
        group.gather()
        num_bytes -= group.gathered_bytes
        yield group
