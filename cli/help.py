"""Print the help of the commands that train: a screen of common options, or all of them."""

import shutil
import textwrap
from collections.abc import Iterator

from lightning_dist.cli.options import Command

_COLUMN = 38
"""Column in which the explanations of common options begin."""

_TITLES = {
    "fit": "Train a model.",
    "validate": "Run one validation epoch.",
    "test": "Run one test epoch.",
    "predict": "Run a model over data and collect what it returns.",
    "profile": "Record some training steps with torch's profiler, and write one Chrome trace per rank. The run ends"
    " after the last recorded step, without validation and checkpoints.",
    "plan": "Predict the memory of a rank and the time of a step in each layout of the devices, from two training steps"
    " on tensors without values. Neither devices nor other processes are needed.",
}

_COMMON = {
    "configuration": {
        "-c, --config=FILE": "a YAML file with these options; later files and options override earlier ones",
        "--print_config": "print the resolved configuration, and exit; =origins says where each value is from",
        "--seed_everything=N": "seed of the random numbers; true: a random one",
    },
    "steps to record": {
        "--steps=FIRST:END": "the optimizer steps, counted from 0: 10:13 records 10, 11 and 12",
        "--output=FOLDER": "folder of the traces; by default profile/ in the run's folder",
    },
    "what to plan for": {
        "--nodes=N": "number of nodes; trainer.num_nodes if it is not given",
        "--devices=N": "number of devices of a node; trainer.devices if it is not given",
        "--memory=SIZE": "memory of a device, such as 80GiB; layouts that need more than 90% of it do not fit",
        "--device=NAME": "the kind of devices, such as h100, if it is not that of this machine",
        "--profile=FILE": "figures of the machines and their links, from lightning-dist doctor --write",
        "--write=FILE": "write the first layout that fits, as a configuration for a further -c",
        "--png=FILE": "draw memory and speed, the parts of steps, and the devices of the best layout",
        "--json": "print the results as JSON",
    },
    "model and data": {
        "--model=CLASS": "LightningModule, such as my_module.MyModel; its arguments: --model.ARGUMENT=VALUE",
        "--model.help=CLASS": "explain the arguments of a module, and exit; --data.help and others do the same",
        "--data=CLASS": "LightningDataModule, with arguments in the same way",
        "--optimizer=CLASS": "optimizer in place of the module's own, such as AdamW with --optimizer.lr=VALUE",
        "--lr_scheduler=CLASS": "learning rate scheduler of that optimizer",
        "--ckpt_path=PATH": "checkpoint to load; auto, in a fit: the newest one of the run, if there is one",
    },
    "devices": {
        "--trainer.accelerator=NAME": "cpu, gpu, ...",
        "--trainer.devices=N": "number of devices on each node, or a list of them",
        "--trainer.num_nodes=N": "number of nodes",
        "--trainer.precision=NAME": "32-true, bf16-mixed, 16-mixed, bf16-true, 64-true, ...",
    },
    "the run": {
        "--trainer.max_epochs=N": "number of epochs; 1000 if max_steps is not given either",
        "--trainer.max_steps=N": "number of optimizer steps; -1: no limit",
        "--trainer.accumulate_grad_batches=N": "number of batches that one optimizer step accumulates",
        "--trainer.gradient_clip_val=X": "largest norm of the gradients",
        "--trainer.val_check_interval=N": "number of batches, or part of an epoch, between two validations",
        "--trainer.limit_train_batches=N": "number of batches, or part of an epoch, to train on; limit_val_batches",
        "--trainer.log_every_n_steps=N": "number of steps between two logged values; 50 if it is not given",
        "--trainer.logger=CLASS": "logger; false: none",
        "--trainer.callbacks+=CLASS": "add a callback, such as EarlyStopping; --trainer.callbacks.patience=3",
        "--trainer.default_root_dir=FOLDER": "folder of the run's files; by default the working directory",
        "--telemetry=BOOL": "log where the time of the steps goes",
    },
}
"""The options that most users need, as they are written, with their explanations."""

_OF_TRAINING = {"fit", "profile"}
_ONLY_IN_TRAINING = (
    "optimizer",
    "lr_scheduler",
    "telemetry",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.val_check_interval",
    "trainer.limit_train_batches",
    "trainer.log_every_n_steps",
)

_EXAMPLES = """\
examples:
  lightning-dist {0} -c my.yaml{1}
  lightning-dist {0} -c my.yaml -c full_shard.yaml --trainer.devices=4 --model.init_args.dim=256{1}
  lightning-dist {0} --model=my_module.MyModel --data=my_module.MyData --trainer.strategy=hybrid_shard{1}
"""

_OF_CHECK = """\
usage: lightning-dist check -c CONFIG [-c CONFIG ...] [options]

Compare the first step of your model and data under a strategy with one process, before an expensive training: the loss,
the gradient of every parameter, and the change of every weight by the optimizer, with gradient clipping and
accumulation. One process starts from the same weights and gets the same batches and random numbers. Nothing is logged,
saved or validated.

Configuration files and options are those of `lightning-dist fit`, and processes are launched in the same way. Rank 0
also computes the step of one process, so that its device must hold the whole model beside its part. For a large
model, check one with fewer layers.

options:
  --steps N             Compare N optimizer steps: the gradients of the first one, the weights after the last one.
                        (default: 1)
  --float64 BOOL        Compute in float64 on both sides, in which rounding hides no mistake, instead of in
                        trainer.precision. (default: true, unless the model raises an error about dtypes)
  --tolerance X         Largest accepted relative deviation. (default: 1e-10 for the loss and gradients and 1e-6 for
                        changes of weights, if all is computed in float64; 1e-4 and 1e-2 if some is in float32; 0.1
                        and 0.5 if some is in bfloat16, float16 or TF32)
  --whole_batch BOOL    Let one process compute the batches of all ranks as one batch, for losses that compare samples
                        of several ranks, instead of one after the other with accumulated gradients, as DDP does.
                        (default: true with manual optimization and sync_batchnorm, else false)
  --json                Print the results as JSON, with the deviations of all parameters.
  -h, --help            Show this and exit; --help-all shows all options, lightning-dist fit --help the common ones

exit codes:
  0 passed   1 deviates, or the step failed   2 the configuration is wrong, or there is nothing to compare

examples:
  lightning-dist check -c examples/gpt/base.yaml -c examples/gpt/hybrid_shard.yaml
  lightning-dist check -c my.yaml --trainer.strategy=tensor_parallel --model.init_args.num_layers=2
  lightning-dist check -c my.yaml --float64=false --json > check.json
  torchrun --nproc-per-node=4 -m lightning_dist.cli check -c my.yaml --trainer.devices=4
"""


def common_options(command: Command) -> str:
    """Return the help with the options that most users need, on about one screen."""
    if command.name == "check":
        return _OF_CHECK
    options = {option.name: option for option in command.options}
    lines = [f"usage: lightning-dist {command.name} -c FILE [-c FILE ...] [--OPTION=VALUE ...]", ""]
    lines += textwrap.wrap(_TITLES[command.name], _width())
    for title, texts in _COMMON.items():
        shown = {left: options[name] for left in texts if (name := _name(left)) in options}
        if command.name not in _OF_TRAINING:
            shown = {left: option for left, option in shown.items() if option.name not in _ONLY_IN_TRAINING}
        if shown:
            lines += ["", f"{title}:"]
        for left, option in shown.items():
            default = "" if option.default in ("", "null") else f" ({option.default})"
            lines += _entry(left, texts[left] + default)
        if title == "model and data":
            lines += _strategies(command)
    lines += ["", "more:", *_entry("-h, --help", "show this, and exit")]
    lines += _entry("--help-all", f"show all {len(options)} options, and exit")
    return "\n".join(lines) + "\n\n" + _EXAMPLES.format(command.name, " --steps 10:13" * (command.name == "profile"))


def _name(left: str) -> str:
    """Return the name of the option that is written as ``-c, --config=FILE``."""
    return left.rpartition("--")[2].partition("=")[0].rstrip("+")


def _strategies(command: Command) -> Iterator[str]:
    yield from ("", "strategies, which spread the model over devices: --trainer.strategy=NAME")
    for name, summary in command.strategies.items():
        yield from _entry(name, summary[0].lower() + summary[1:].rstrip("."))
    yield from _entry("auto, ddp, fsdp, ...", "those of Lightning (auto)")
    yield from _entry("--trainer.strategy.ARGUMENT=VALUE", "set an argument of the strategy, such as dp_shard_size")
    yield from _entry("--trainer.strategy.help=NAME", "explain the arguments of a strategy, and exit")


def all_options(command: Command) -> str:
    """Return the help with all options: their types, meanings and defaults."""
    lines = [f"usage: lightning-dist {command.name} -c FILE [-c FILE ...] [--OPTION=VALUE ...]", ""]
    lines.append("In a YAML file, trainer.max_steps is the key max_steps below the key trainer.")
    for title, is_shown in (("options", False), ("options of the Trainer", True)):
        lines += ["", f"{title}:"]
        for option in command.options:
            if option.name.startswith("trainer") is is_shown:
                value = "=VALUE" if len(option.type) >= _COLUMN else f"={option.type}" if option.type else ""
                details = [option.type] if value == "=VALUE" else []
                details += [f"default: {option.default}"] if option.default else []
                lines.append(f"  {', '.join(option.flags)}{value}")
                text = option.help + f" ({'; '.join(details)})" * bool(details)
                lines += textwrap.wrap(text, _width(), initial_indent=" " * 8, subsequent_indent=" " * 8)
    lines += ["  --help-all", "        show this, and exit"]
    return "\n".join(lines) + "\n"


def _width() -> int:
    return min(120, max(80, shutil.get_terminal_size(fallback=(120, 60)).columns))


def _entry(left: str, text: str) -> Iterator[str]:
    """Yield the lines of an option on the left with its explanation on the right."""
    if len(left) + 4 > _COLUMN:
        yield f"  {left}"
        left = ""
    first = f"  {left}".ljust(_COLUMN)
    yield from textwrap.wrap(text, _width(), initial_indent=first, subsequent_indent=" " * _COLUMN)
