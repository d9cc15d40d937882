"""Find the modules of a model that hold stacked experts, and try whether a part of their experts can compute alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_dist import _compat
from lightning_dist.mesh.consensus import check_agreement
from lightning_dist.model.experts import looks_like_experts, num_inputs
from lightning_dist.model.randomness import unchanged_random_numbers
from lightning_dist.tracing.block_trial import copy_of, kind_of_module
from lightning_dist.tracing.planning import OncePerKind, first_that_fits

__all__ = ["ExpertPlan", "find_expert_plan"]

Form = Literal["routed", "dense"]
"""How a module is called: with tokens, the indices of their experts and their weights, or with each expert's tokens."""

_TOLERANCE = 1e-9
"""The largest relative difference, in float64, between the whole module and its parts on random inputs."""

_NUM_TOKENS, _NUM_TRIED = 6, 2


@dataclass(frozen=True)
class ExpertPlan:
    """Say which modules have their experts distributed.

    Args:
        forms: The form of the call of each module whose experts are distributed, by the module's full name.
        left: Why the experts of other modules stay on all ranks, by the full name of the module.
        over_tp: Full names of the modules among ``forms`` whose experts are distributed over ``tp``.
    """

    forms: Mapping[str, Form]
    left: Mapping[str, str]
    over_tp: frozenset[str] = frozenset()

    def outline(self) -> str:
        """Return the plan as a text that is the same on two ranks if the plans are."""
        return repr((sorted(self.forms.items()), sorted(self.left), sorted(self.over_tp)))

    def styles(self) -> dict[str, tuple[str, str]]:
        """Return for each module of experts its style in a plan of ``tp``, and a remark for the start-up table."""
        same = "the ranks of tp have the same ones, since their number does not divide by ep_size x tp_size"
        found = {name: ("experts", "" if name in self.over_tp else same) for name in self.forms}
        return {**found, **{name: ("replicate", why) for name, why in self.left.items()}}


def find_expert_plan(
    root: nn.Module,
    ep: int,
    tp: int,
    device: torch.device,
    styles: Mapping[str, str] | None = None,
    is_strict: bool = False,
) -> ExpertPlan:
    """Find the modules in ``root`` whose experts can be distributed over ranks.

    Each kind of module is tried once, in float64 with random weights of two experts: one expert must compute for itself
    what it computes among several. This is a collective over all processes.

    Args:
        root: The model, whose parameters may be on the meta device.
        ep: Number of ranks with different tokens that experts are distributed over.
        tp: Number of ranks with the same tokens that experts are distributed over, within each of ``ep``.
        device: Device of the trial.
        styles: The style that the user's plan gives a module of experts, ``experts`` or ``replicate``, by full name.
        is_strict: Whether to raise an error if the experts of a module cannot be distributed.

    Raises:
        ValueError: If ``ep`` is more than 1, and there are no experts that can be distributed, or their number does not
            divide by ``ep``; if experts that ``styles`` names cannot be distributed; or, if ``is_strict``, if any
            cannot.
    """
    styles = styles or {}
    candidates = looks_like_experts(root)
    _refuse_others(root, styles, candidates)
    forms: dict[str, Form] = {}
    left, replicated = dict[str, str](), dict[str, str]()
    over_tp: set[str] = set()
    tried = OncePerKind[tuple[Form | None, str]]()
    num_holders = Counter(id(param) for owner in root.modules() for param in _compat.own_parameters(owner).values())
    for name, module in candidates.items():
        if styles.get(name, "experts") != "experts":
            replicated[name] = "as the plan says"
            continue
        reason = _unfit(module, num_holders)
        if reason is not None:
            left[name] = reason
            continue
        form, why_not = tried.of(kind_of_module(module, name), lambda: _try(module, device))  # noqa: B023
        if form is None:
            left[name] = why_not
            continue
        number = cast(int, module.num_experts)
        _refuse_unequal(name, module, number, ep)
        if tp > 1 and number % (ep * tp) == 0:
            over_tp.add(name)
        elif ep == 1:
            left[name] = f"its {number} experts do not divide by tp_size={tp}"
            continue
        forms[name] = form
    _refuse_left(root, forms, left, styles, f"ep_size={ep}" if ep > 1 else f"tp_size={tp}", is_strict)
    if not forms and ep > 1:
        raise _no_experts(root, ep)
    plan = ExpertPlan(forms, {**left, **replicated}, frozenset(over_tp))
    check_agreement("The plan of expert parallelism", plan.outline())
    return plan


def _refuse_others(root: nn.Module, styles: Mapping[str, str], candidates: Mapping[str, nn.Module]) -> None:
    """Raise an error if the user's plan gives the style of experts to a module that holds none."""
    for name in (name for name, style in styles.items() if style == "experts" and name not in candidates):
        raise ValueError(f"plan: {name} ({type(root.get_submodule(name)).__name__}) is not experts: {_FORM}.")


def _no_experts(root: nn.Module, ep: int) -> ValueError:
    return ValueError(
        f"ep_size={ep}, but {type(root).__name__} has no experts to distribute: {_FORM}, as Hugging Face's mixtures of"
        " experts have. Use ep_size=1."
    )


def _refuse_unequal(name: str, module: nn.Module, number: int, ep: int) -> None:
    """Raise an error if ``ep`` does not divide the ``number`` experts of ``module``."""
    if number % ep:
        sizes = [size for size in range(1, number + 1) if number % size == 0]
        raise ValueError(
            f"ep_size={ep} does not divide the {number} experts of {name} ({type(module).__name__}): each"
            f" rank holds as many experts as the others. Use one of {', '.join(map(str, sizes))}."
        )


_FORM = (
    "experts are a module with an attribute num_experts and parameters that stack the weights of all experts along"
    " their first dimension"
)


def _refuse_left(
    root: nn.Module,
    forms: Mapping[str, Form],
    left: Mapping[str, str],
    styles: Mapping[str, str],
    asked: str,
    is_strict: bool,
) -> None:
    """Raise an error if experts that must be distributed cannot be.

    Args:
        root: The model that has the experts.
        forms: As for :class:`ExpertPlan`.
        left: Why the experts of other modules cannot be distributed, by the full name of the module.
        styles: As for :func:`find_expert_plan`.
        asked: The argument that asks for the distribution, with its value, such as ``"ep_size=2"``.
        is_strict: As for :func:`find_expert_plan`.
    """
    for name in (name for name in left if name in styles):
        raise ValueError(f"plan: {name} has the style experts, but {left[name]}. Use replicate for it.")
    must_be = asked.startswith("ep_size") and not forms
    if left and (is_strict or must_be):
        listed = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        advice = "Use ep_size=1" if must_be else "Set strict_plan=False to leave these experts on all ranks"
        raise ValueError(f"{asked}: experts cannot be distributed ({listed}). {advice}.")


def _unfit(module: nn.Module, num_holders: Counter[int]) -> str | None:
    """Return why the experts of ``module`` cannot be distributed, as far as this is known without a trial."""
    params, number = dict(module.named_parameters(recurse=False)), module.num_experts
    others = [key for key, param in params.items() if param.ndim < 2 or param.size(0) != number]
    if others:
        return f"{others[0]} does not stack {number} experts along its first dimension"
    if any(True for child in module.children() for _ in child.parameters()):
        return "it has parameters besides the stacked ones, in modules inside of it"
    tied = [key for key, param in params.items() if num_holders[id(param)] > 1]
    if tied:
        return f"{tied[0]} is tied to another parameter"
    return None


def _try(module: nn.Module, device: torch.device) -> tuple[Form | None, str]:
    """Return the form of a module whose experts compute alone what they compute together; else None and why not."""
    number = num_inputs(module)
    if number not in (1, 3):
        return None, (
            f"its forward takes {number} arguments, and not tokens, the indices of their experts, and their weights"
        )

    def attempt(form: Form) -> tuple[Form, str]:
        try:
            difference = _difference(module, form, device)
        except Exception as error:  # A module of a user may do anything.
            text = str(error).strip().split("\n")[0]
            return form, f"one expert cannot compute alone ({type(error).__name__}: {text})"
        if difference is None:
            return form, "it does not return one output for each token, of the shape of the tokens"
        if not difference <= _TOLERANCE:
            why_not = "one expert alone does not compute what it computes among several"
            return form, f"{why_not} (difference {difference:.1e})"
        return form, ""

    candidates: list[Form] = ["routed" if number == 3 else "dense"]
    return first_that_fits(candidates, attempt)


@torch.no_grad()
def _difference(module: nn.Module, form: Form, device: torch.device) -> float | None:
    """Return the largest relative difference between two experts together and each alone; None: of another shape."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, generator=generator)

    weights = {key: draw(_NUM_TRIED, *param.shape[1:]) * 0.3 for key, param in module.named_parameters(recurse=False)}
    module = copy_of(module, shared=module.parameters()).eval()  # No dropout; a copy may count tokens in its buffers.
    together = _compat.with_parameters(module, weights)
    together.num_experts = _NUM_TRIED  # type: ignore[assignment]
    with unchanged_random_numbers():
        for size in _feature_sizes(module):
            try:
                return _compare(module, together, weights, form, draw, size)
            except (RuntimeError, IndexError, ValueError) as error:
                failure = error
    raise failure


def _compare(
    module: nn.Module, together: nn.Module, weights: dict[str, Tensor], form: Form, draw: Any, features: int
) -> float | None:
    tokens = draw(_NUM_TOKENS * (1 if form == "routed" else _NUM_TRIED), features)
    index = torch.arange(_NUM_TOKENS, device=tokens.device)[:, None] % 3 + torch.arange(2, device=tokens.device)
    index = (index % _NUM_TRIED).contiguous()  # Some tokens list the second expert first.
    scores = draw(_NUM_TOKENS, 2).sigmoid()
    given = (tokens.clone(), index, scores) if form == "routed" else (tokens.clone(),)
    whole = together.forward(*given)
    if not isinstance(whole, Tensor) or whole.shape != tokens.shape:
        return None
    alone = torch.zeros_like(whole)
    for expert in range(_NUM_TRIED):
        single = _compat.with_parameters(module, {key: value[expert : expert + 1] for key, value in weights.items()})
        single.num_experts = 1  # type: ignore[assignment]
        if form == "dense":
            part = slice(expert * _NUM_TOKENS, (expert + 1) * _NUM_TOKENS)
            alone[part] = single.forward(tokens[part].clone())
            continue
        rows, choices = (index == expert).nonzero(as_tuple=True)
        ones = torch.ones_like(scores[rows, :1])
        result = single.forward(tokens[rows], torch.zeros_like(index[rows, :1]), ones)
        alone.index_add_(0, rows, result * scores[rows, choices, None])
    return float((whole - alone).norm() / whole.norm().clamp_min(1e-30))


def _feature_sizes(module: nn.Module) -> Sequence[int]:
    """Return the sizes that the features of tokens may have: those of dimensions of the stacked weights."""
    named = [getattr(module, name, None) for name in ("hidden_dim", "hidden_size")]
    sizes = [size for size in named if isinstance(size, int)]
    for param in module.parameters(recurse=False):
        sizes += [size for size in param.shape[1:] if size not in sizes] if param.ndim == 3 else []
    return list(dict.fromkeys(sizes))
