"""Run norms and heads after the last block on this rank's tokens, so that logits are never whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_dist._compat import tree_map
from lightning_dist.techniques.context_parallel.split_tokens import SplitTokens

__all__ = ["gather_before", "run_on_tokens"]


def run_on_tokens(modules: Iterable[nn.Module]) -> None:
    """Let each of ``modules`` compute on this rank's tokens, if it is given a split tensor, and split its result.

    The hooks must be added after those of the sharding, which expect plain tensors.

    Args:
        modules: Modules with one tensor among their arguments, which compute token by token.
    """
    for module in modules:
        given: list[SplitTokens] = []

        def unwrap(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[SplitTokens] = given
        ) -> Any:
            given.clear()

            def local(value: Any) -> Any:
                if not isinstance(value, SplitTokens):
                    return value
                if value.is_flat:
                    return value.whole(type(module).__name__)
                given.append(value)
                return value.local

            return tree_map(local, (args, kwargs))

        def wrap(module: nn.Module, args: Any, output: Any, given: list[SplitTokens] = given) -> Any:
            if not given or not isinstance(output, Tensor):
                return None
            return given.pop().with_local(output)

        module.register_forward_pre_hook(unwrap, with_kwargs=True, prepend=True)
        module.register_forward_hook(wrap, always_call=True)


def gather_before(modules: Iterable[nn.Module]) -> None:
    """Give each of ``modules`` whole tensors in place of split ones."""

    def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = type(module).__name__
        return tree_map(lambda value: value.whole(name) if isinstance(value, SplitTokens) else value, (args, kwargs))

    for module in modules:
        module.register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
