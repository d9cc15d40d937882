"""Compute token-wise modules and the loss a few tokens at a time, so that long sequences take less memory.

This follows the tiled MLPs and the tiled loss of ALST (Bekman et al., 2025, https://arxiv.org/abs/2506.13996): what a
module computes between its input and its output exists for one tile of tokens at a time, in the forward, and again in
the backward, which computes it a second time.

- ``options``: Defines the arguments.
- ``plan``: Represents which modules are tiled.
- ``tiles``: Runs a function tile by tile.
- ``tiled_logits``: Represents logits that are computed only where they are used, such as in the loss.
- ``planner``: Finds the modules from a step on fake tensors, and tries them.
- ``tiling``: Defines the technique.
"""

from lightning_dist.techniques.tiling.options import TilingOptions
from lightning_dist.techniques.tiling.plan import TilingError, TilingPlan
from lightning_dist.techniques.tiling.planner import find_tiling_plan
from lightning_dist.techniques.tiling.tiling import Tiling

__all__ = ["Tiling", "TilingError", "TilingOptions", "TilingPlan", "find_tiling_plan"]
