"""Collect the command's uses of private API of jsonargparse and LightningCLI, each with what could replace it.

The module was tested with jsonargparse 4.53 and lightning 2.6.
"""

import argparse
import inspect
from collections.abc import Iterator, Mapping
from subprocess import Popen
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, _util
from jsonargparse._actions import _ActionHelpClassPath, _ActionPrintConfig
from jsonargparse._typehints import ActionTypeHint
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_dist.cli.errors import closest
from lightning_dist.plugins.strategies import other_names

_AUTO = "auto"


class StrategyAction(ActionTypeHint):
    """Parse ``trainer.strategy`` as a registered name, a class name or an import path, each with arguments.

    Lightning's annotation is ``str | Strategy``, which jsonargparse treats as two unrelated alternatives: a name, which
    cannot have arguments, and a class. This could be replaced by an annotation in Lightning that knows the registry, or
    by a hook in jsonargparse that normalizes a value before it is checked.
    """

    def _check_type(
        self, value: Any, append: bool = False, cfg: Namespace | None = None, mode: str | None = None
    ) -> Any:
        try:
            if isinstance(value, _util.NestedArg) and value.key == "class_path":
                value = {"class_path": value.val}
            if isinstance(value, str) and value.lstrip().startswith("{"):
                value = yaml.safe_load(value)
            if isinstance(value, _util.NestedArg):
                given = cfg.get(self.dest) if cfg is not None else None
                if isinstance(given, str) or given is None:
                    cfg = Namespace({self.dest: _expand(given or _AUTO, argument=value.key)})
            elif isinstance(value, str):
                value = _resolve(value)
            elif isinstance(value, (dict, Namespace)) and isinstance(value.get("class_path"), str):
                value = _with_registered_arguments(value)
            if isinstance(value, dict) and cfg is not None:
                value = _without_sizes_of(cfg.get(self.dest), value)
        except TypeError as error:
            raise TypeError(f'Parser key "{self.dest}":\n  {error}') from error
        return super()._check_type(value, append=append, cfg=cfg, mode=mode)

    def instantiate_classes(self, value: Any) -> Any:
        """Instantiate the strategy with the type ``Strategy``; with the union, errors would be about ``str``."""
        if isinstance(value, str):
            return value
        union, self._typehint = self._typehint, Strategy
        try:
            return super().instantiate_classes(value)
        finally:
            self._typehint = union


class StrategyHelpAction(_ActionHelpClassPath):
    """Explain a strategy for ``--trainer.strategy.help NAME``, where NAME may be a registered name or a class.

    This could be replaced in the same way as StrategyAction.
    """

    def resolve_help_type(self, value: str | None, option_string: str) -> type:
        if value is None:
            names = ", ".join(sorted(StrategyRegistry))
            raise TypeError(f"{option_string}: expected the name of a strategy: {names}")
        try:
            strategy: type = _util.import_object(_class_path(value))
        except TypeError as error:
            raise TypeError(f"{option_string}: {error}") from error
        return strategy


def install_strategy_actions(parser: ArgumentParser, key: str) -> None:
    """Make an argument of type ``str | Strategy`` and its ``.help`` accept registered names with arguments.

    Args:
        parser: A parser that has the argument.
        key: The argument's name, such as ``trainer.strategy``.
    """
    action, help_action = (parser._option_string_actions[f"--{name}"] for name in (key, f"{key}.help"))
    action.__class__, help_action.__class__ = StrategyAction, StrategyHelpAction
    ours = {name: entry["strategy"] for name, entry in StrategyRegistry.items() if _is_ours(entry["strategy"])}
    signatures = [f"{name}({', '.join(parameters_of(cls))})" for name, cls in ours.items()]
    others = [_AUTO, *sorted(name for name in StrategyRegistry if name not in ours and "_find_unused" not in name)]
    action.metavar = "NAME|CLASS"
    action.help = (
        f"{'; '.join(signatures)}; or Lightning's {', '.join(others)}; or a class. Arguments: --{key}.ARGUMENT=VALUE, "
        f"or init_args beside class_path in a YAML file; what they mean: --{key}.help NAME"
    )
    help_action.help = "Explain the arguments of a strategy, given by name or class, and exit."


class PrintConfigAction(_ActionPrintConfig):
    """Print the configuration for ``--print_config=FLAGS``, which takes the flag ``origins`` besides jsonargparse's.

    This could be replaced by a hook in jsonargparse for flags, or for what is printed.
    """

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        flags = value[0].split(",")
        parser.shows_origins = "origins" in flags
        others = ",".join(flag for flag in flags if flag != "origins")
        super().__call__(parser, namespace, [others], option_string)


def install_print_config_action(parser: ArgumentParser) -> None:
    """Make ``--print_config`` accept the flag ``origins``, which sets the attribute ``shows_origins`` of the parser."""
    action = parser._option_string_actions["--print_config"]
    action.__class__ = PrintConfigAction
    action.help = (
        "Print the resolved configuration and exit. FLAGS are separated by commas: origins says behind each value which"
        " line of a file or which option it is from, skip_default leaves out defaults, skip_unset what is not set."
    )


class CommandLine(LightningCLI):
    """Extend LightningCLI by a public method that handles ``ckpt_path`` and can be overridden.

    This could be replaced by a public hook in LightningCLI before parsing.
    """

    def _parse_ckpt_path(self) -> None:
        path = self.config[self.config.subcommand].get("ckpt_path")
        if path:
            self.read_checkpoint_hparams(str(path))

    def read_checkpoint_hparams(self, path: str) -> None:
        """Check the checkpoint path, and read the model's hyperparameters from the checkpoint."""
        super()._parse_ckpt_path()


def names_class(hyperparameters: Mapping[str, Any]) -> bool:
    """Return whether LightningCLI has saved these hyperparameters of a model, and with them the name of its class.

    This could be replaced by a documented key.
    """
    return "_class_path" in hyperparameters


def active_parser(parser: ArgumentParser, error: Exception | None) -> ArgumentParser:
    """Return the parser of the command that an error is about.

    This could be replaced by jsonargparse calling ``error`` on that parser.
    """
    at_fault = getattr(error, "subcommand_parser", None)
    if at_fault is None and parser._subcommands_action is not None:
        at_fault = parser._subcommands_action.choices.get(next(iter(getattr(parser, "args", [])), ""))
    return at_fault or parser


def child_processes(trainer: Trainer) -> list[Popen[bytes]]:
    """Return the processes that the Trainer's launcher has started.

    This could be replaced by a public method that ends them.
    """
    return list(getattr(trainer.strategy.launcher, "procs", []))


def option_names(parser: ArgumentParser) -> set[str]:
    """Return a parser's long options without dashes.

    This could be replaced by a public listing of a parser's arguments.
    """
    return {
        option.removeprefix("--").rstrip("+") for option in parser._option_string_actions if option.startswith("--")
    }


def options_of(parser: ArgumentParser, command: str) -> list[tuple[argparse.Action, Any]]:
    """Return the options of a command, each with its type hint, which is None if it has none.

    This could be replaced in the same way as ``option_names``.

    Args:
        parser: The parser of the whole command line.
        command: Name of the command.
    """
    assert parser._subcommands_action is not None
    actions = parser._subcommands_action.choices[command]._actions
    return [(action, getattr(action, "_typehint", None)) for action in actions]


def type_of(parser: ArgumentParser, key: str) -> Any:
    """Return the type hint of an argument, None if it has none.

    This could be replaced in the same way as ``option_names``.
    """
    action: argparse.Action | None = parser._option_string_actions.get(f"--{key}")
    return getattr(action, "_typehint", None)


def parameters_of(class_or_path: type | str) -> list[str]:
    """Return the names of a class's configurable arguments, including those that it passes on as ``**kwargs``."""
    cls = _util.import_object(class_or_path) if isinstance(class_or_path, str) else class_or_path
    names: list[str] = ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False)
    return names


def class_names(typehint: Any) -> set[str]:
    """Return the names of the imported classes that match a type hint."""
    return {cls.__name__ for base in _classes(typehint) for cls in _subclasses(base) if not inspect.isabstract(cls)}


def literals(typehint: Any) -> list[str]:
    """Return the values of all ``Literal`` types in a type hint, as text."""
    if get_origin(typehint) is Literal:
        return [str(value) for value in get_args(typehint)]
    return [value for argument in get_args(typehint) for value in literals(argument)]


def _resolve(value: str) -> Any:
    """Turn the name of a strategy into a class to instantiate, unless the Trainer itself must get the name."""
    name = value.lower()
    if name in StrategyRegistry:
        # The Trainer gives some of Lightning's names a special meaning, such as ddp_notebook, so these stay names as
        # long as they have no arguments.
        return _expand(name) if _is_ours(StrategyRegistry[name]["strategy"]) else name
    if name == _AUTO:
        return name
    return {"class_path": _class_path(value)}


def _with_registered_arguments(value: Any) -> Any:
    """Resolve the ``class_path`` of a strategy, and add the arguments that a registered name stands for."""
    spec = value.as_dict() if isinstance(value, Namespace) else dict(value)
    name = spec["class_path"].lower()
    if name == _AUTO:
        raise TypeError("the strategy 'auto' is no class_path: write `strategy: auto`.")
    if name not in StrategyRegistry:
        return spec | {"class_path": _class_path(spec["class_path"])}
    expanded = _expand(name)
    return spec | expanded | {"init_args": expanded.get("init_args", {}) | (spec.get("init_args") or {})}


def _without_sizes_of(before: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Reset the sizes given for the strategy ``before``, which another strategy replaces; jsonargparse would keep them.

    Args:
        before: The strategy that was given earlier, in a file or by a flag.
        spec: The ``class_path`` and ``init_args`` of the strategy that replaces it.
    """
    if not isinstance(before, Namespace) or before.get("class_path") == spec["class_path"]:
        return spec
    cls = _class_of(spec["class_path"].rpartition(".")[2])
    known = inspect.signature(cls).parameters if cls is not None and _is_ours(cls) else {}
    sizes = {
        name: known[name].default
        for name in vars(before.get("init_args") or Namespace())
        if name.endswith("_size") and name in known
    }
    return spec | {"init_args": sizes | (spec.get("init_args") or {})} if sizes else spec


def _expand(name: str, argument: str | None = None) -> dict[str, Any]:
    """Return the ``class_path`` and ``init_args`` of a registered name.

    Raises:
        TypeError: If the name is not registered, and so takes no ``argument``.
    """
    if name not in StrategyRegistry:
        raise TypeError(f"the strategy {name!r} takes no argument {argument!r}: before it, name a strategy that does.")
    entry = StrategyRegistry[name]
    spec: dict[str, Any] = {"class_path": _util.get_import_path(entry["strategy"])}
    return spec | {"init_args": dict(entry["init_params"])} if entry["init_params"] else spec


def _class_path(name: str) -> str:
    """Return the import path of the strategy with this registered name, class name or import path."""
    found = _class_of(name)
    if found is not None:
        return str(_util.get_import_path(found))
    if "." not in name:
        known = {*StrategyRegistry, _AUTO, *class_names(Strategy)}
        meant = other_names.hint(name)
        raise TypeError(f"no strategy is named {name!r}" + (f": {meant}" if meant else closest(name, known)))
    try:
        imported = _util.import_object(name)
    except (ImportError, AttributeError, ValueError):
        return name  # The parser explains what is wrong with an import path.
    if not (inspect.isclass(imported) and issubclass(imported, Strategy)):
        raise TypeError(f"{name} is not a Strategy.")
    return str(_util.get_import_path(imported))


def _class_of(name: str) -> type | None:
    """Return the strategy with this registered name or class name."""
    if name.lower() in StrategyRegistry:
        registered: type = StrategyRegistry[name.lower()]["strategy"]
        return registered
    return next((cls for cls in _subclasses(Strategy) if cls.__name__ == name), None)


def _is_ours(strategy: type) -> bool:
    return strategy.__module__.partition(".")[0] == "lightning_dist"


def _classes(typehint: Any) -> Iterator[type]:
    if inspect.isclass(typehint) and not get_args(typehint):
        yield typehint
    for argument in get_args(typehint):
        yield from _classes(argument)


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for subclass in subclasses:
        yield from _subclasses(subclass)
