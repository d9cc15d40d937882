"""Say which cases show that a callback, logger, Trainer option or optimizer works, for the table of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatch

__all__ = ["NOT_TRIED", "SUBJECTS", "cases_of", "shown_cases"]

SUBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Callbacks": {
        "`BackboneFinetuning`": ("*.backbone_finetuning",),
        "`BaseFinetuning`": ("*.base_finetuning", "restoring.resume_finetuning"),
        "`BasePredictionWriter`": ("callbacks.prediction_writer_*",),
        "`BatchSizeFinder`": ("callbacks.batch_size_finder",),
        "`DeviceStatsMonitor`": ("callbacks.device_stats",),
        "`EarlyStopping`": ("callbacks.callback_stopping_*", "callbacks.stopping_strict", "resume.resumed_callbacks"),
        "`EMAWeightAveraging`": ("callbacks.callback_ema", "callbacks.callback_late_ema", "callbacks.ema_with_*"),
        "`GradientAccumulationScheduler`": ("callbacks.callback_accumulation",),
        "`LambdaCallback`": ("callbacks.lambda_callback",),
        "`LearningRateFinder`": ("callbacks.learning_rate_finder",),
        "`LearningRateMonitor`": ("callbacks.callback_rate_of_*",),
        "`ModelCheckpoint`": ("checkpoints.checkpoint_*", "checkpoints.two_checkpoints", "resume.resumed_from_*"),
        "`ModelPruning`": ("whole_weights.model_pruning",),
        "`ModelSummary`": ("callbacks.callback_summary", "callbacks.summary_with_example"),
        "`OnExceptionCheckpoint`": ("checkpoints.exception_checkpoint",),
        "`RichModelSummary`": ("callbacks.callback_rich_summary",),
        "`RichProgressBar`": ("callbacks.callback_rich_bar",),
        "`SpikeDetection`": ("callbacks.spike_detection",),
        "`StochasticWeightAveraging`": ("callbacks.callback_stochastic_averaging",),
        "`ThroughputMonitor`": ("callbacks.throughput",),
        "`Timer`": ("callbacks.callback_timer*", "restoring.resume_timer"),
        "`TQDMProgressBar`": ("callbacks.callback_tqdm_bar",),
        "`WeightAveraging`": ("callbacks.callback_averaging", "callbacks.averaging_then_validate"),
        "a callback that logs": ("logging.callback_logs",),
        "a callback that hooks a layer": ("callbacks.feature_hook",),
        "a callback that calls the model": ("callbacks.callback_runs_model",),
        "the same inside `full_parameters`": ("callbacks.callback_runs_whole_model",),
    },
    "Loggers": {
        "`CSVLogger`": ("loggers.csv",),
        "`TensorBoardLogger`": ("loggers.tensorboard", "whole_weights.log_graph"),
        "`MLFlowLogger`": ("loggers.lightning_mlflow",),
        "`lightning_dist.MLflowLogger`": ("loggers.own_mlflow",),
        "several loggers": ("logging.two_loggers",),
        "`self.log` and `self.log_dict`": ("logging.logged_*", "logging.log_dict", "logging.log_numbers"),
    },
    "Trainer options": {
        "`accumulate_grad_batches`": ("trainer.accumulate*",),
        "`barebones`": ("trainer.barebones",),
        "`benchmark`": ("trainer.benchmark",),
        "`check_val_every_n_epoch`": ("trainer.val_every_2_epochs",),
        "`detect_anomaly`": ("layers_and_backwards.detect_anomaly",),
        "`deterministic`": ("trainer.deterministic",),
        "`enable_checkpointing`": ("checkpoints.checkpoint_default",),
        "`enable_model_summary`": ("trainer.model_summary",),
        "`enable_progress_bar`": ("trainer.progress_bar",),
        "`fast_dev_run`": ("trainer.fast_dev*",),
        "`gradient_clip_val`": ("trainer.clip_*",),
        "`gradient_clip_algorithm`": ("trainer.clip_value",),
        "`inference_mode`": ("trainer.no_inference_mode",),
        "`limit_train_batches`": ("trainer.limit_fraction", "trainer.no_limits"),
        "`limit_val_batches`": ("trainer.no_validation", "trainer.no_limits"),
        "`limit_test_batches`": ("trainer.limited_evaluation",),
        "`limit_predict_batches`": ("trainer.limited_evaluation",),
        "`log_every_n_steps`": ("trainer.seldom_logged",),
        "`max_epochs`": ("trainer.no_epochs", "trainer.endless"),
        "`max_steps`": ("trainer.max_steps",),
        "`max_time`": ("trainer.no_time",),
        "`min_epochs`": ("trainer.min_epochs",),
        "`min_steps`": ("trainer.min_steps",),
        "`num_sanity_val_steps`": ("trainer.sanity*",),
        "`overfit_batches`": ("trainer.overfit",),
        "`precision`": ("buffers_and_precision.precision_*",),
        "`profiler`": ("trainer.*_profiler",),
        "`reload_dataloaders_every_n_epochs`": ("trainer.reloaded_loaders",),
        "`sync_batchnorm` on the CPU": ("modules.sync_batch_norm",),
        "`use_distributed_sampler`": ("trainer.distributed_sampler*",),
        "`val_check_interval`": ("trainer.val_every_2_batches", "trainer.val_fraction", "trainer.val_across_epochs"),
        "`fit(ckpt_path=...)`": ("resume.resumed_*",),
    },
    "Optimizers and schedulers": {
        "`Adadelta`": ("optimizers.optimizer_adadelta",),
        "`Adafactor`": ("whole_weights.adafactor",),
        "`Adagrad`": ("optimizers.optimizer_adagrad",),
        "`Adam`": ("optimizers.optimizer_adam",),
        "`Adamax`": ("optimizers.optimizer_adamax",),
        "`AdamW`": ("optimizers.optimizer_adamw",),
        "`ASGD`": ("optimizers.optimizer_asgd",),
        "`LBFGS`": ("optimizers.optimizer_lbfgs",),
        "`Muon`": ("optimizers.optimizer_muon",),
        "`NAdam`": ("optimizers.optimizer_nadam",),
        "`RAdam`": ("optimizers.optimizer_radam",),
        "`RMSprop`": ("optimizers.optimizer_rmsprop",),
        "`Rprop`": ("optimizers.optimizer_rprop",),
        "`SGD`": ("optimizers.optimizer_sgd",),
        "`SparseAdam` with dense gradients, which it refuses": ("whole_weights.sparse_adam",),
        "`foreach=False`, `fused=True`": ("optimizers.optimizer_no_foreach", "optimizers.optimizer_fused"),
        "an elementwise optimizer of your own": ("optimizers.own_optimizer",),
        "LAMB, by norms of whole weights": ("optimizers.lamb", "optimizers.lamb_by_item"),
        "an optimizer of your own for whole matrices": ("optimizers.whole_matrices",),
        "several parameter groups": ("optimizers.optimizer_differing_groups", "optimizers.group_is_added"),
        "several optimizers, by hand": ("manual_optimization.gan",),
        "schedulers by epoch and by step": ("schedulers.scheduler_*",),
        "`ReduceLROnPlateau`": ("schedulers.scheduler_plateau*",),
    },
}
"""For each kind, the rows of the table, each with the names of the cases that show it. A name may be a pattern."""

NOT_TRIED: dict[str, dict[str, str]] = {
    "Loggers": {
        "CometLogger": "needs an account of a service",
        "LitLogger": "needs an account of a service",
        "WandbLogger": "needs an account of a service",
    },
    "Trainer options": {
        "accelerator": "only the CPU was tried",
        "enable_autolog_hparams": "Lightning leaves it to the logger",
        "model_registry": "needs an account of a service",
    },
}
"""What no case runs, each with the reason."""


def cases_of(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that match one of ``patterns``.

    Raises:
        ValueError: If a pattern matches no name.
    """
    names = list(names)
    found: list[str] = []
    for pattern in patterns:
        matching = [name for name in names if fnmatch(name, pattern)]
        if not matching:
            raise ValueError(f"{pattern!r} matches no case: correct it in tests/behaviour/subjects.py.")
        found += matching
    return list(dict.fromkeys(found))


def shown_cases(names: Iterable[str]) -> Iterator[str]:
    """Yield those of ``names`` that show a subject; they run under every strategy of the table."""
    names = list(names)
    for rows in SUBJECTS.values():
        for patterns in rows.values():
            yield from cases_of(patterns, names)
