"""Define a case, and the :class:`Run` that its function is given."""

from __future__ import annotations

import dis
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_dist import (
    ContextParallelStrategy,
    DataParallelStrategy,
    FullShardStrategy,
    HybridShardStrategy,
    NDParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from lightning_dist.checkpoint import consolidate
from lightning_dist.parallel_module import parallelized
from lightning_dist.run.parity import whole_parameters
from lightning_dist.techniques.compression import LocalSGD
from lightning_dist.techniques.pipeline import Pipeline

__all__ = [
    "CASES",
    "HOLDS_PARTS",
    "LAYOUTS",
    "OWN_GRADIENTS",
    "STRATEGIES",
    "TECHNIQUES",
    "Case",
    "Layout",
    "Run",
    "case",
]

NUM_MICROBATCHES = 2
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class Layout:
    """Describe one column of the table: a strategy and its number of processes.

    Args:
        world_size: Number of processes.
        num_data_parallel: Number of parts into which a global batch is divided over the ranks.
        make: Function that makes the strategy; it is given the further keyword arguments that a case asks for.
        neighbours: Number of neighbouring ranks that have the same part of a global batch.
        like: Column of a strategy that this one differs from by a technique: what a case states for that column holds
            here too.
        variant: Key of :data:`tests.behaviour.models.VARIANTS`: what the blocks of the cases' models have in addition.
        tolerance: Smallest accepted relative error of a recorded value, where a technique rounds.
        title: Description of the technique, shown below its table.
    """

    world_size: int
    num_data_parallel: int
    make: Callable[..., Any]
    neighbours: int = 1
    like: str = ""
    variant: str = ""
    tolerance: float = 0.0
    title: str = ""

    def part_of(self, rank: int) -> int:
        """Return the index of the part of the global batch that ``rank`` has."""
        return rank // self.neighbours % self.num_data_parallel


def _on_shards(title: str, arguments: dict[str, Any], variant: str = "") -> Layout:
    def make(**kwargs: Any) -> FullShardStrategy:
        return FullShardStrategy(**{**arguments, **kwargs})

    return Layout(2, 2, make, like="full", variant=variant, title=title)


STRATEGIES: dict[str, Layout] = {
    "full": Layout(2, 2, FullShardStrategy),
    "hybrid": Layout(4, 4, lambda **kwargs: HybridShardStrategy(2, 2, **kwargs)),
    "tp": Layout(2, 1, lambda **kwargs: TensorParallelStrategy(**{**_SPLIT, **kwargs})),
    "pp": Layout(2, 1, lambda **kwargs: PipelineParallelStrategy(**{**_PIPELINE, **kwargs})),
    "nd": Layout(4, 2, lambda **kwargs: NDParallelStrategy(dp_shard_size=2, **{**_PIPELINE, **kwargs})),
    "data": Layout(2, 2, lambda **kwargs: DataParallelStrategy(**kwargs)),
    "nd_tp": Layout(4, 1, lambda **kwargs: NDParallelStrategy(**{**_SPLIT, **_PIPELINE, **kwargs})),
    "data_tp": Layout(4, 2, lambda **kwargs: NDParallelStrategy(dp_replicate_size=2, **{**_SPLIT, **kwargs}), 2),
}
"""The strategies that cases run under.

``nd`` shards the stages of a pipeline, ``nd_tp`` splits their layers, and ``data_tp`` replicates split layers.
"""

# Some cases are models of which nothing can be split.
_SPLIT: dict[str, Any] = {"tp_size": 2, "strict_plan": False}
_PIPELINE: dict[str, Any] = {"pp_size": 2, "num_microbatches": NUM_MICROBATCHES}

TECHNIQUES: dict[str, Layout] = {
    "zero_1": _on_shards("`full_shard` with `zero_stage: 1`", {"zero_stage": 1}),
    "zero_2": _on_shards("`full_shard` with `zero_stage: 2`", {"zero_stage": 2}),
    "offload": _on_shards("`full_shard` with `offload: both`", {"offload": "both"}),
    "recompute": _on_shards(
        "`full_shard` with `activation_checkpointing: {budget: 0.3}`", {"activation_checkpointing": {"budget": 0.3}}
    ),
    "in_backward": _on_shards("`full_shard` with `step_in_backward: true`", {"step_in_backward": True}),
    "compressed": Layout(
        2, 2, lambda **kwargs: HybridShardStrategy(2, 1, **{"compression": "bf16", **kwargs}),
        like="hybrid", tolerance=3e-2, title="`hybrid_shard` with two replicas and `compression: bf16`, to 3%",
    ),
    "local": Layout(
        2, 2, lambda **kwargs: DataParallelStrategy(**{"sync": LocalSGD(1), **kwargs}),
        like="data", title="`data_parallel` with `sync: LocalSGD(1)`",
    ),
    "tp_tokens": Layout(
        2, 1, lambda **kwargs: TensorParallelStrategy(**{**_SPLIT, **kwargs}), neighbours=2,
        like="tp", variant="attention", title="`tensor_parallel`, where hidden states are split along the sequence",
    ),
    "cp": Layout(
        2, 1, lambda **kwargs: ContextParallelStrategy(cp_size=2, **kwargs), neighbours=2,
        like="full", variant="attention", title="`context_parallel` with `cp_size: 2`",
    ),
    "tiled": _on_shards(
        "`full_shard` with `tiled_mlp: 3` and `tiled_loss: 3`", {"tiled_mlp": 3, "tiled_loss": 3}, variant="attention"
    ),
    "ep": _on_shards("`full_shard` with `ep_size: 2`", {"ep_size": 2}, variant="experts"),
}  # fmt: skip
"""The techniques that cases run under, each beside the simplest strategy that has it.

What a case states for the strategy is allowed under the technique, and not demanded. Moreover, a technique may refuse a
case by an error of the project on every rank.
"""

HOLDS_PARTS = tuple(column for column in STRATEGIES if column != "data")
"""The columns in which a rank has only a part of the model, so that the model can be called only in steps."""

REFERENCES: dict[str, Layout] = {
    "one": Layout(1, 1, lambda **kwargs: "auto"),
    "ddp2": Layout(2, 2, lambda **kwargs: "ddp_find_unused_parameters_true"),
    "ddp4": Layout(4, 4, lambda **kwargs: "ddp_find_unused_parameters_true"),
}

LAYOUTS: dict[str, Layout] = {**STRATEGIES, **TECHNIQUES, **REFERENCES}


@dataclass(frozen=True)
class Case:
    """Describe a piece of ordinary Lightning code and how its runs are compared.

    Args:
        name: Unique name, made of the area and the name within the area: ``"area.name"``.
        title: Description of what the code does, shown in the table.
        function: Function that runs the code on one rank, and records values in the :class:`Run` that it is given.
        area: Name of the file in ``cases`` that the case is in.
        refused: Maps a column (or ``"*"`` for all) to a regular expression that the error under it must match.
        differs: Maps a column (or ``"*"`` for all) to the sentence that says what is different under it. The case runs
            there, and is not compared.
        tolerance: Largest accepted relative error of a recorded value.
        leave_out: Names of weights that are not compared, such as those whose true gradient is zero.
        reference: The run to compare with. ``"one"`` is one process; ``"ddp"`` is Lightning's ddp with as many ranks as
            the global batch has parts under the strategy.
        strategy: Maps a column (or ``"*"`` for all) to further keyword arguments of its strategy.
        timeout_s: Time in seconds after which the case counts as hung.
        columns: The only columns that the case is about; empty: all.
    """

    name: str
    title: str
    function: Callable[[Run], None]
    area: str
    refused: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-10
    leave_out: Sequence[str] = ()
    reference: str = "one"
    strategy: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeout_s: float = 60.0
    columns: Sequence[str] = ()

    def reference_for(self, column: str) -> str:
        """Return the key of :data:`REFERENCES` that ``column`` is compared with."""
        if column in REFERENCES:
            return column
        ranks = LAYOUTS[column].num_data_parallel
        return f"ddp{ranks}" if self.reference == "ddp" and ranks > 1 else "one"

    def entry_for(self, column: str, entries: Mapping[str, Any]) -> Any:
        """Return the entry of ``refused`` or ``differs`` for ``column``, or the one for ``"*"``, or None."""
        return entries.get(column, entries.get(LAYOUTS[column].like, entries.get("*")))


OWN_GRADIENTS = "Each replica has gradients of its own, and what is done with them is not linear."
"""What differs where replicas train on their own, even if they are synchronized after each step."""

ROUNDED = "Rounding errors grow: the training diverges, its optimizer compares losses, or a number has few digits."
"""What differs where a technique sums in another order, or rounds what it sends."""

CASES: dict[str, Case] = {}


def case(title: str, name: str | None = None, **kwargs: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a case.

    Args:
        title: Description of what the case does, shown in the table.
        name: Name of the case; None: the name of the function. A loop that registers several cases must name each.
        kwargs: Further arguments of :class:`Case`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        area = function.__module__.rpartition(".")[2]
        key = f"{area}.{function.__name__ if name is None else name}"
        assert key not in CASES, f"two cases are named {key}"
        CASES[key] = Case(key, title, function, area, **kwargs)
        return function

    return register


class Run:
    """Run a case on this rank, and record its values.

    Args:
        case: The case that is run.
        column: Key of :data:`STRATEGIES` or :data:`REFERENCES` that the case is run under.
        folder: Empty folder that all ranks share.
    """

    def __init__(self, case: Case, column: str, folder: Path) -> None:
        self.case = case
        self.column = column
        self.folder = folder
        self.layout = LAYOUTS[column]
        self.observed: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.inexact = ""
        """Why the technique of this run does not compute what the reference computes; empty: it does."""

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def is_reference(self) -> bool:
        """Return whether this run is a reference, that is, one process or Lightning's ddp."""
        return self.column in REFERENCES

    def record(self, name: str, value: Any, per_rank: bool = False) -> None:
        """Record a value that must equal the reference's.

        Args:
            name: Name of the value, which appears in the report of a difference.
            value: Tensor, number, string, or container of these.
            per_rank: Whether the value belongs to this rank's part of the batch. Such values are not compared rank by
                rank. Instead, those of all ranks are joined in the order of the samples and compared as one.
        """
        (self.own if per_rank else self.observed)[name] = _plain(value)

    def record_error(self, name: str, function: Callable[[], Any]) -> None:
        """Record the class and the message of the error that ``function`` raises; None if it raises no error.

        If a technique refuses the case, its error is raised.
        """
        try:
            function()
        except Exception as error:
            if self.layout.like and is_raised_by_project(error):
                raise
            self.record(name, f"{type(error).__name__}: {error}")
        else:
            self.record(name, None)

    def make_strategy(self, **kwargs: Any) -> Any:
        """Make a new instance of the strategy of this run's column.

        Args:
            kwargs: Keyword arguments of the strategy, which override those of the case.
        """
        columns = ("*", self.layout.like, self.column)
        more = {key: value for column in columns for key, value in self.case.strategy.get(column, {}).items()}
        return self.layout.make(**{**more, **kwargs})

    def trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make a Trainer that prints nothing, with this column's strategy.

        Args:
            kwargs: Arguments of the Trainer, which override the defaults. The default is to train one epoch of 4 steps.
        """
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.layout.world_size,
            "precision": "64-true",
            "use_distributed_sampler": False,
            "max_epochs": None if "max_steps" in kwargs or "max_time" in kwargs else 1,
            "limit_train_batches": 4,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "logger": History(),
            "enable_checkpointing": any(isinstance(c, Checkpoint) for c in kwargs.get("callbacks") or ()),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        if "strategy" not in kwargs:
            kwargs["strategy"] = self.make_strategy()
        return pl.Trainer(**{**defaults, **kwargs})

    def loader(
        self, dataset: Dataset[Any] | None = None, batch_size: int = GLOBAL_BATCH_SIZE, **kwargs: Any
    ) -> DataLoader[Any]:
        """Make a loader of this rank's parts of the global batches, which have the samples in their order.

        Args:
            dataset: Map-style dataset; None: the samples of :func:`tests.behaviour.models.samples`.
            batch_size: Number of samples of the global batch.
            kwargs: Further arguments of the DataLoader.
        """
        if dataset is None:
            from tests.behaviour.models import samples

            dataset = samples()
        sampler = _Part(len(dataset), self.layout.num_data_parallel, self.data_parallel_rank)  # type: ignore[arg-type]
        return DataLoader(dataset, batch_size=batch_size // self.layout.num_data_parallel, sampler=sampler, **kwargs)

    @property
    def data_parallel_rank(self) -> int:
        """Return the index of the part of the global batch that this rank has."""
        return self.layout.part_of(self.rank)

    def fit(
        self,
        model: pl.LightningModule,
        train: Iterable[Any] | None = None,
        val: Any = None,
        ckpt_path: str | None = None,
        name: str = "fit",
        observe: bool = True,
        **kwargs: Any,
    ) -> pl.Trainer:
        """Fit a module, and record its weights, metrics, progress and checkpoints by :meth:`observe`.

        Args:
            model: The user's module.
            train: Loader of the training data; None: the result of :meth:`loader`. It is not used if the module has a
                ``train_dataloader`` of its own.
            val: Loader of the validation data, or True for the result of :meth:`loader`; None: no validation.
            ckpt_path: Checkpoint to resume from, as for ``Trainer.fit``.
            name: Prefix of the names of the recorded values.
            observe: Whether to record anything.
            kwargs: Arguments of :meth:`trainer`.
        """
        trainer = self.trainer(**kwargs)
        if ckpt_path is not None and trainer.precision == "64-true":
            # Lightning's own strategy loads a checkpoint before it converts the module to float64, and would thereby
            # round the loaded weights to float32.
            model.double()
        loaders: dict[str, Any] = {}
        if "train_dataloader" not in vars(type(model)):
            loaders["train_dataloaders"] = self.loader() if train is None else train
        if val is not None:
            loaders["val_dataloaders"] = self.loader() if val is True else val
        trainer.fit(model, **loaders, ckpt_path=ckpt_path)
        if observe:
            self.observe(trainer, model, name)
        return trainer

    def observe(self, trainer: pl.Trainer, model: pl.LightningModule, name: str = "fit") -> None:
        """Record weights, buffers, metrics, progress and checkpoints of ``trainer``."""
        if self.column == "local" and (trainer.gradient_clip_val or any(not _is_linear(o) for o in trainer.optimizers)):
            self.inexact = OWN_GRADIENTS
        elif self.column == "local" and self.case.reference == "ddp":
            self.inexact = "Each replica has buffers of its own."
        self.record(f"{name}: steps, epochs", [trainer.global_step, trainer.current_epoch])
        self.record(f"{name}: metrics", dict(trainer.callback_metrics))
        for logger in trainer.loggers:
            if isinstance(logger, History) and trainer.is_global_zero:
                self.own[f"{name}: history"] = _plain(logger.history)
        self.record_weights(model, name)
        for index, callback in enumerate(c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)):
            for which in ("best", "last"):
                path = getattr(callback, f"{which}_model_path")
                self.record(f"{name}: {which} checkpoint of {index}", self.relative(path))
                if path:
                    self.record_checkpoint(path, f"{name}: {which} checkpoint of {index}, content")
            self.record(f"{name}: best score of {index}", callback.best_model_score)
            self.record(f"{name}: best k of {index}", {self.relative(k): v for k, v in callback.best_k_models.items()})
        if any(isinstance(c, ModelCheckpoint) for c in trainer.checkpoint_callbacks):
            trainer.strategy.barrier()
            found = sorted(
                self.relative(path)
                for path in self.folder.rglob("*.ckpt")
                if not any(part.startswith(".") for part in Path(self.relative(path)).parts)
            )
            self.record(f"{name}: files", found)

    def relative(self, path: str | Path) -> str:
        """Return ``path`` relative to :attr:`folder`, with symbolic links resolved."""
        return os.path.relpath(os.path.realpath(path), os.path.realpath(self.folder)) if path else ""

    def record_weights(self, model: nn.Module, name: str = "model") -> None:
        """Record the whole parameters and buffers of ``model``. This is a collective."""
        self.record(f"{name}: weights", whole_parameters(model))
        self.record(f"{name}: buffers", _whole_buffers(model))

    def record_predictions(self, predictions: Any, name: str = "predictions") -> None:
        """Record the list of tensors that ``trainer.predict`` returned on this rank.

        Nothing is recorded if the result is None, as it is on a rank whose predictions another rank returns.
        """
        if predictions is not None:
            self.record(name, torch.cat(predictions), per_rank=True)

    def record_checkpoint(self, path: str | Path, name: str) -> None:
        """Record the weights, optimizer states, schedulers and progress of a checkpoint of any format."""
        self.record(name, _comparable(_read(path)))


def _is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the mean of an optimizer's updates is its update by the mean of the gradients."""
    return type(optimizer) is torch.optim.SGD


def _whole_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers of ``model``, each from a pipeline stage that has it. This is a collective."""
    parallel = parallelized(model)
    pipeline = None if parallel is None else parallel.get(Pipeline)
    others = frozenset() if pipeline is None else pipeline.buffers_of_others
    own = {name: b for name, b in model.named_buffers() if not b.is_meta and name not in others}
    parts = [own] if parallel is None else parallel.states.collect_parts(own)
    return {name: buffer for part in parts for name, buffer in part.items()}


def _read(path: str | Path) -> dict[str, Any]:
    if Path(path).is_file():
        return torch.load(path, map_location="cpu", weights_only=False)
    with tempfile.TemporaryDirectory() as folder:
        destination = Path(folder) / "whole.ckpt"
        consolidate(path, destination, trust=True)
        return torch.load(destination, map_location="cpu", weights_only=False)


def _comparable(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that does not depend on the strategy that wrote it."""
    kept = {k: checkpoint[k] for k in ("epoch", "global_step", "state_dict", "lr_schedulers") if k in checkpoint}
    states = []
    for state in checkpoint.get("optimizer_states", []):
        states.append({index: dict(values) for index, values in state.get("state", {}).items()})
    return {**kept, "optimizer_states": states}


def _plain(value: Any) -> Any:
    """Convert tensors in ``value`` to NumPy arrays, so that it can be sent to another process."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
        whole = whole.detach().cpu()
        return whole.double().numpy().copy() if whole.dtype == torch.bfloat16 else whole.numpy().copy()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int | float | str | bool | None):
        return value
    return str(value)


class _Part(Sampler[int]):
    """Yield every ``num_parts``-th index from ``part`` on, so that a step's global batch has consecutive indices."""

    def __init__(self, length: int, num_parts: int, part: int) -> None:
        self._indices = range(part, length - length % num_parts, num_parts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class History(Logger):
    """Keep everything that is logged, which happens on rank 0 only."""

    def __init__(self) -> None:
        self.history: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {k: v for k, v in metrics.items() if not k.startswith(("checkpoint/", "perf/", "memory/", "pipeline/"))}
        if kept:
            self.history.append((step, {key: float(value) for key, value in kept.items()}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def is_raised_by_project(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of this project, and not of a test or another package, has raised ``error``.

    An error of torch or Python in a line of this project is a defect, and no refusal.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code, root = last.tb_frame.f_code, Path(__file__).parents[2]
    if code.co_code[last.tb_lasti] not in (dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]):
        return False
    return any(Path(code.co_filename).is_relative_to(root / package) for package in ("lightning_dist", "plugins"))


def quiet() -> None:
    """Silence this worker, except for errors."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
