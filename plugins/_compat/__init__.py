"""Wrap the private names of Lightning and torchmetrics, and those of torch that only plugins use.

Each says what could replace it.

- ``checkpoints``: Changes how checkpoints are found and read.
- ``loaders``: Reads and changes data loaders.
- ``loops``: Reads and changes what the loops of a Trainer do.
- ``metrics``: Reads and changes the state of metrics.
- ``modules``: Runs LightningModules outside of the loops.
- ``norms``: Computes norms of gradients over all ranks.
- ``processes``: Starts processes and their groups.
- ``progress``: Reads and corrects the progress of the loops.
- ``scaler``: Scales losses for float16.
- ``tuning``: Lets finders of batch sizes and learning rates work with several ranks.
- ``streams``: Lets ranks agree on batches.
- ``strategies``: Gives names to what strategies and precision plugins have to override and to set.

The names were checked with Lightning 2.6.
"""

from lightning_dist.plugins._compat.accumulation import change_accumulation, configured_accumulation
from lightning_dist.plugins._compat.checkpoints import (
    LINK_CHECKPOINT,
    dump_checkpoint,
    intercept_checkpoint_paths,
    path_after_requeue,
    read_checkpoint_directories,
    requeue_signal,
)
from lightning_dist.plugins._compat.loaders import (
    FINGERPRINT,
    are_sequential,
    choose_training_samplers,
    given_train_loader,
    make_dataloader,
    mode_of_loaders,
    num_evaluation_batches,
    seed_workers_by,
    silence_predictions,
    training_loaders,
    transferred,
    validates_alike,
)
from lightning_dist.plugins._compat.loops import (
    agree_on_decisions,
    allow_skipped_steps,
    around_every_batch,
    average_model,
    before_reducing_evaluation,
    before_validation,
    changes_accumulation,
    evaluate_without_inference_mode,
    is_first_batch,
    leave_signals_alone,
    logging_step,
    observe_fetching,
    output_of_step,
    put_training_weights_back,
    scheduled_accumulation,
    step_name,
)
from lightning_dist.plugins._compat.metrics import (
    compute_alone,
    gather_metrics_over,
    metric_state,
    set_batch_value,
    set_metric_state,
    update_metrics_apart,
    weigh_ranks_exactly,
)
from lightning_dist.plugins._compat.modules import (
    INSTANTIATOR,
    check_output_of_training_step,
    log_graph_before_sharding,
    logging_to,
    made_optimizers,
    optimizers_to_device,
    run_examples_by,
    set_device_mesh,
)
from lightning_dist.plugins._compat.norms import (
    compute_gradient_norms_of_shards,
    total_norms,
)
from lightning_dist.plugins._compat.processes import (
    ForkLauncher,
    ScriptLauncher,
    init_process_group,
    is_interactive,
    let_children_exit,
    let_groups_be_copied,
    set_rank_zero,
    set_timeout,
)
from lightning_dist.plugins._compat.scaler import ShardedGradScaler
from lightning_dist.plugins._compat.strategies import LightningStrategy, clip_after_closure, explain_strategy_errors
from lightning_dist.plugins._compat.streams import (
    agree_on_evaluation_batches,
    agree_on_training_batches,
    complete_results,
    described_results,
    has_length,
    is_surely_sized,
)
from lightning_dist.plugins._compat.tuning import agree_on_trials, reduce_losses_of_finders

__all__ = [
    "FINGERPRINT",
    "INSTANTIATOR",
    "LINK_CHECKPOINT",
    "ForkLauncher",
    "LightningStrategy",
    "ScriptLauncher",
    "ShardedGradScaler",
    "agree_on_decisions",
    "agree_on_evaluation_batches",
    "agree_on_training_batches",
    "agree_on_trials",
    "allow_skipped_steps",
    "are_sequential",
    "around_every_batch",
    "average_model",
    "before_reducing_evaluation",
    "before_validation",
    "change_accumulation",
    "changes_accumulation",
    "check_output_of_training_step",
    "choose_training_samplers",
    "clip_after_closure",
    "complete_results",
    "compute_alone",
    "compute_gradient_norms_of_shards",
    "configured_accumulation",
    "described_results",
    "dump_checkpoint",
    "evaluate_without_inference_mode",
    "explain_strategy_errors",
    "gather_metrics_over",
    "given_train_loader",
    "has_length",
    "init_process_group",
    "intercept_checkpoint_paths",
    "is_first_batch",
    "is_interactive",
    "is_surely_sized",
    "leave_signals_alone",
    "let_children_exit",
    "let_groups_be_copied",
    "log_graph_before_sharding",
    "logging_step",
    "logging_to",
    "made_optimizers",
    "make_dataloader",
    "metric_state",
    "mode_of_loaders",
    "num_evaluation_batches",
    "observe_fetching",
    "optimizers_to_device",
    "output_of_step",
    "path_after_requeue",
    "put_training_weights_back",
    "read_checkpoint_directories",
    "reduce_losses_of_finders",
    "requeue_signal",
    "run_examples_by",
    "scheduled_accumulation",
    "seed_workers_by",
    "set_batch_value",
    "set_device_mesh",
    "set_metric_state",
    "set_rank_zero",
    "set_timeout",
    "silence_predictions",
    "step_name",
    "total_norms",
    "training_loaders",
    "transferred",
    "update_metrics_apart",
    "validates_alike",
    "weigh_ranks_exactly",
]  # fmt: skip
