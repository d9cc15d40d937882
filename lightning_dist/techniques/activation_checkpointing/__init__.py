"""Keep fewer activations for the backward.

- ``options``: Defines the argument.
- ``mode``: Says what is kept, as the strategies' argument ``activation_checkpointing`` chooses.
- ``activation_checkpointing``: Implements the technique.
- ``block_state``: Lets a block run again with the buffers and random numbers of its forward.
- ``block_containers``: Undoes what a forward has changed in lists and other containers.
- ``saved_operations``: Chooses the results that ``selective`` keeps.
- ``offload``: Keeps activations in the memory of the CPU.
"""

from lightning_dist.techniques.activation_checkpointing.activation_checkpointing import ActivationCheckpointing
from lightning_dist.techniques.activation_checkpointing.mode import CheckpointingMode, Kind
from lightning_dist.techniques.activation_checkpointing.options import CheckpointingOptions

__all__ = ["ActivationCheckpointing", "CheckpointingMode", "CheckpointingOptions", "Kind"]
