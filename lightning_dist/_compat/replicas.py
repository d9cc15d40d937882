"""Let a manager of torchft ask for the members of a step again after an error.

The module was tested with torchft 0.2. A manager that forgets the error of the last question could replace it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft import Manager

__all__ = ["forget_error"]


def forget_error(manager: Manager) -> None:
    """Let the next question for the members of a step be asked.

    Otherwise ``start_quorum`` raises the error of the last question again, and asks none.
    """
    made: Any = manager
    made._quorum_future = None
