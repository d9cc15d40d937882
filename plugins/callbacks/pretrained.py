"""Start runs from pretrained weights."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.parallel_module import parallelized
from lightning_dist.run.pretrained import load_safetensors

__all__ = ["LoadPretrained"]


class LoadPretrained(Callback):
    """Load pretrained weights from a local Hugging Face folder, with any strategy; each rank reads its own part.

    Build the model in ``configure_model`` with ``from_config``, not ``from_pretrained``, so that no rank ever holds the
    whole model. A run that resumes from a checkpoint takes its weights from there, and does not read the folder. The
    weights are loaded into a module only once, so that a test after a fit uses the trained weights.

    Args:
        path: The folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        prefix: Text that the LightningModule's parameter names have before the names in the files. Parameters without
            this prefix, such as those of a new head, are left unchanged.

    Raises:
        ValueError: When the run begins, if names or shapes in the files are not the module's.
    """

    def __init__(self, path: str | Path, prefix: str = "model.") -> None:
        self.path = path
        self.prefix = prefix
        self._filled: LightningModule | None = None

    # on_fit_start is too early, because some strategies restore the checkpoint after it, and only then is it known
    # whether there is one. The sanity check is a validation, and runs before training.
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fill(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fill(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fill(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fill(trainer, pl_module)

    def _fill(self, trainer: Trainer, module: LightningModule) -> None:
        if module is self._filled:
            return
        self._filled = module
        if trainer.ckpt_path is not None:
            return
        whole = parallelized(module)
        if whole is not None:
            whole.free()
        load_safetensors(module, self.path, self.prefix)
        rank_zero_info(f"Loaded the pretrained weights in {self.path}.")
