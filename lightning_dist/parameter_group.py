"""Define the interface of a parameter group, which manages the parameters of one unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.units import Unit

__all__ = ["ParameterGroup"]


class ParameterGroup(ABC):
    """Manage the parameters of a unit: what its modules hold in a step, and what optimizers and checkpoints see.

    The methods that are not abstract have answers that fit a group whose gathered parameters share their memory with
    what the optimizer sees.
    """

    unit: Unit
    """The unit; set when the module is built."""

    owners: list[nn.Module]
    """The modules that hold the parameters, in the same order on all ranks; set when the module is built."""

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
        """Return the mesh whose ranks have parts of a batch, and reduce the gradients of the group."""

    @property
    @abstractmethod
    def is_gathered(self) -> bool:
        """Return whether the modules hold the gathered parameters now."""

    @abstractmethod
    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` is one of the gathered parameters."""

    @abstractmethod
    def gather(self) -> None:
        """Put the gathered parameters into the modules. A collective where the parameters are sharded now."""

    @abstractmethod
    def free(self) -> None:
        """Put the parameters that the optimizer sees back into the modules."""

    @abstractmethod
    def copy_requires_grad(self) -> None:
        """Let the gathered parameters require gradients as those do that the optimizer sees."""

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether gradients are reduced after a backward, or added up on each rank (accumulation)."""
        self._syncs_gradients = enabled

    @property
    def syncs_gradients(self) -> bool:
        """Return the choice of :meth:`set_gradient_sync`."""
        return self._syncs_gradients

    @property
    def needs_gather(self) -> bool:
        """Return whether modules can compute only after :meth:`gather`, so that all ranks must call them alike."""
        return True

    @property
    def is_sharded(self) -> bool:
        """Return whether a rank holds only a part of each parameter, so that gathering them is a collective."""
        return False

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

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which nothing frees the gathered parameters, such as moving the module to a device."""
        return nullcontext()

    def after_forward(self) -> None:
        """Act after the forward of a block, where FSDP2 frees its parameters."""
        return

    def kept_after_forward(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are not freed after a forward."""
        return nullcontext()

    def whole_state_dict(self) -> AbstractContextManager[None]:
        """Return a context in which ``state_dict()`` of a module takes the gathered parameters."""
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
        """Let the step clear gradients that a backward, which may have failed, left unreduced."""
        return

    # What the first-step audit asks.

    def write_back(self) -> None:
        """Write what a step has changed in the gathered parameters into those that the optimizer sees.

        :attr:`on_change` is called, while they are gathered, with the names of those that the step has changed other
        than through ``param.data``; these are the same on all ranks.
        """
        return

    def unwritten(self) -> list[str]:
        """Return the names of gathered parameters whose values the optimizer would not see."""
        return []

    def lost_hooks(self) -> list[str]:
        """Return the names of parameters with tensor hooks that their gathered ones do not have."""
        return []

    def unreduced_names(self) -> list[str]:
        """Return the names of parameters whose gradient was left on the gathered ones."""
        return []

    def names_without_gradient(self) -> list[str]:
        """Return the names of parameters that got a gradient in the last backward here, and have no reduced one."""
        return []
