"""Compare what a strategy and one process have computed, and say what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dist.plugins.parity_check.recording import Recording
from lightning_dist.plugins.parity_check.reference import Reference
from lightning_dist.run.parity import errors

__all__ = ["Report", "Tolerances", "compare", "tolerances"]

NUM_ROWS = 10
_PROPORTIONAL = 1e-3
"""Largest relative error with which a gradient counts as a multiple of the reference's gradient."""


@dataclass(frozen=True)
class Tolerances:
    """Hold the largest accepted deviations.

    Args:
        gradients: Largest relative deviation of the loss and of gradients.
        weights: Largest relative deviation of the change of weights. It is larger, because adaptive optimizers amplify
            the rounding errors of small gradients.
        negligible: Fraction of the norm of all gradients below which the norm of one does not count.
        noise: Fraction of the root mean square of gradients below which an element may consist of rounding errors
            alone, so that the change of its weight is not compared.
    """

    gradients: float
    weights: float
    negligible: float
    noise: float


_BY_DTYPE = {
    torch.float64: Tolerances(1e-10, 1e-6, 1e-6, 1e-12),
    torch.float32: Tolerances(1e-4, 1e-2, 1e-2, 1e-5),
}
_LOWEST = Tolerances(0.1, 0.5, 0.1, 1e-2)


def tolerances(dtypes: set[torch.dtype], given: float | None) -> Tolerances:
    """Return the tolerances for a computation in ``dtypes``.

    Args:
        dtypes: Floating-point dtypes in which anything was computed or reduced; the least precise one counts.
        given: Tolerance for the loss, gradients and weights instead of the default; None: the default.
    """
    lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    chosen = _BY_DTYPE.get(lowest, _LOWEST)
    # TF32 has the mantissa of float16.
    if lowest == torch.float32 and torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        chosen = _LOWEST
    if given is None:
        return chosen
    return Tolerances(given, given, chosen.negligible, chosen.noise)


@dataclass
class Report:
    """Hold the result of a check.

    Args:
        title: The heading of the report, which names what was compared.
        facts: Description of the comparison, as pairs of a label and a text.
        tolerances: The largest accepted deviations.
        losses: Loss of each step under the strategy.
        reference_losses: Loss of each step in one process.
        loss_deviation: Largest relative deviation of a loss.
        gradients: Deviation of each gradient by parameter name.
        weights: Deviation of each parameter's change by name.
        factors: Gradients of the first step that are a multiple of those of one process, with the factor.
        findings: Sentences about mistakes; empty if the check has passed.
        notes: Sentences that a user should know although they name no mistake.
    """

    title: str
    facts: list[tuple[str, str]]
    tolerances: Tolerances
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    loss_deviation: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with deviations of all parameters."""
        values = asdict(self)
        values["facts"] = dict(self.facts)
        return {"passed": self.passed, **_finite(values)}

    def __str__(self) -> str:
        worst = sorted(
            {*self.gradients, *self.weights},
            key=lambda name: (
                -max(
                    self.gradients.get(name, 0.0) / self.tolerances.gradients,
                    self.weights.get(name, 0.0) / self.tolerances.weights,
                )
            ),
        )[:NUM_ROWS]
        width = max([len(name) for name in worst], default=0)
        heading = f"the {len(worst)} of {len(self.weights or self.gradients)} parameters that deviate most"
        width = max(width, len(heading))
        lines = [self.title, *(f"  {label:<12}{text}" for label, text in self.facts), ""]
        if self.losses:
            lines.append(f"  {'':<{width}}  {'strategy':>14}  {'one process':>14}  {'deviation':>10}")
            for step, (own, other) in enumerate(zip(self.losses, self.reference_losses, strict=True)):
                label = "loss" if len(self.losses) == 1 else f"loss of step {step}"
                lines.append(f"  {label:<{width}}  {own:>14.8g}  {other:>14.8g}  {_relative(own, other):>10.1e}")
            lines.append("")
        lines.append(f"  {heading:<{width}}  {'gradient':>14}  {'change':>14}")
        for name in worst:
            cells = [
                _cell(deviation, limit)
                for deviation, limit in (
                    (self.gradients.get(name), self.tolerances.gradients),
                    (self.weights.get(name), self.tolerances.weights),
                )
            ]
            factor = f"  x {self.factors[name]:.6g}" if name in self.factors else ""
            lines.append(f"  {name:<{width}}  {cells[0]:>14}  {cells[1]:>14}{factor}".rstrip())
        lines += ["", *(f"note: {note}" for note in self.notes)]
        lines += [f"wrong: {finding}" for finding in self.findings]
        lines.append("passed" if self.passed else "FAILED")
        return "\n".join(lines)


def _cell(deviation: float | None, limit: float) -> str:
    return "-" if deviation is None else f"{'> ' if deviation > limit else ''}{deviation:.1e}"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def compare(report: Report, recording: Recording, reference: Reference, calls_per_step: int) -> None:
    """Fill ``report`` with the deviations of a recorded run from one process, and with findings.

    Args:
        report: The report, with its tolerances.
        recording: The run under the strategy.
        reference: The same run in one process.
        calls_per_step: Number of calls of ``training_step`` on a rank for each step.
    """
    _compare_losses(report, recording, reference, calls_per_step)
    limits = report.tolerances
    own, other = recording.gradients.tensors, reference.gradients
    found = {*own, *other, *recording.gradients.differing}
    like = {name: weight for name, weight in recording.initial.items() if name in found}
    filled = [{name: side.get(name, torch.zeros_like(like[name])) for name in like} for side in (own, other)]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in filled[1].values()))
    if norm == 0:
        report.findings.append("There is nothing to compare: every gradient of one process is zero.")
        return
    report.gradients = errors(filled[0], filled[1], limits.negligible)
    for name, (_, distance) in recording.gradients.differing.items():
        scale = max(float(filled[1][name].double().norm()), limits.negligible * norm)
        report.gradients[name] = max(report.gradients[name], distance / scale)
    report.factors = _factors(filled[0], filled[1], report.gradients, limits.gradients)
    _compare_weights(report, recording, reference, filled)
    _explain_gradients(report, recording)
    _explain_weights(report, recording, reference)


def _compare_losses(report: Report, recording: Recording, reference: Reference, calls_per_step: int) -> None:
    own = [call for calls in zip(*recording.batches, strict=True) for call in calls]
    per_step = calls_per_step * len(recording.batches)
    losses = _means(
        [call.loss for call in own], [1.0 if call.weight is None else call.weight for call in own], per_step
    )
    num_steps = len(own) // per_step
    others = _means(reference.losses, reference.weights_of_losses, len(reference.losses) // num_steps)
    if losses is None or others is None:
        report.notes.append("training_step returned no loss, which is therefore not compared.")
        return
    report.losses, report.reference_losses = losses, others
    report.loss_deviation = max(map(_relative, losses, others))
    if report.loss_deviation > report.tolerances.gradients:
        report.findings.append(f"The loss deviates by {report.loss_deviation:.1e}.")


def _means(losses: Sequence[float | None], weights: Sequence[float], per_step: int) -> list[float] | None:
    """Return the weighted mean of the losses of each step; None if a loss is missing."""
    means = []
    for start in range(0, len(losses), per_step):
        part = [loss for loss in losses[start : start + per_step] if loss is not None]
        if len(part) < per_step:
            return None
        counts = weights[start : start + per_step]
        pairs = [(loss, count) for loss, count in zip(part, counts, strict=True) if count]
        means.append(sum(loss * count for loss, count in pairs) / (sum(counts) or 1.0))
    return means


def _relative(own: float, other: float) -> float:
    deviation = abs(own - other) / max(abs(other), 1e-30) if own != other else 0.0
    return math.inf if math.isnan(deviation) else deviation


def _factors(
    own: Mapping[str, Tensor], other: Mapping[str, Tensor], deviations: Mapping[str, float], limit: float
) -> dict[str, float]:
    """Return the factor of every deviating gradient that is a multiple of the reference's."""
    found = {}
    for name, deviation in deviations.items():
        first, second = own[name].double(), other[name].double()
        square = float((second * second).sum())
        if deviation <= limit or not square:
            continue
        factor = float((first * second).sum()) / square
        if factor and float((first - factor * second).norm()) <= _PROPORTIONAL * abs(factor) * math.sqrt(square):
            found[name] = factor
    return {name: factor for name, factor in found.items() if abs(factor - 1) > _PROPORTIONAL}


def _compare_weights(
    report: Report, recording: Recording, reference: Reference, gradients: Sequence[Mapping[str, Tensor]]
) -> None:
    """Compare the changes of weights, which a small learning rate does not hide behind the weights themselves."""
    limits, initial = report.tolerances, recording.initial
    noise = _noise(gradients[0], gradients[1], limits.noise)
    unclear = [name for name, elements in noise.items() if elements.all()]
    changes = []
    for side in (recording.weights.tensors, reference.weights):
        changes.append({name: side[name].double() - initial[name].double() for name in initial if name not in unclear})
        for name, elements in noise.items():
            if name in changes[-1]:
                changes[-1][name][elements] = 0
    if noise:
        left_out = sum(int(elements.sum()) for elements in noise.values())
        report.notes.append(
            f"{left_out:,} of {sum(map(torch.numel, gradients[1].values())):,} elements of gradients, in"
            f" {_list(list(noise))}, are no larger than rounding errors: the changes of these weights are not compared,"
            " because an adaptive optimizer makes them of rounding errors."
        )
    report.weights = errors(changes[0], changes[1], limits.negligible)
    scale = limits.negligible * math.sqrt(sum(float(change.square().sum()) for change in changes[1].values()))
    for name, (_, distance) in recording.weights.differing.items():
        if name in report.weights and distance:
            relative = distance / max(float(changes[1][name].norm()), scale, torch.finfo(torch.float64).tiny)
            report.weights[name] = max(report.weights[name], relative)
    if not any(change.any() for change in changes[1].values()):
        rates = set(reference.learning_rates)
        why = ", since its learning rate is 0: compare more steps" if rates == {0.0} else ""
        report.notes.append(f"The step changes no weights in one process{why}.")


def _noise(own: Mapping[str, Tensor], other: Mapping[str, Tensor], noise: float) -> dict[str, Tensor]:
    """Return which elements of gradients may consist of rounding errors alone, for gradients that have such elements.

    They are not zero, but smaller on both sides than the fraction ``noise`` of the root mean square of the gradient, or
    of all gradients.
    """
    squares = {name: float(gradient.double().square().sum()) for name, gradient in other.items()}
    mean_square = sum(squares.values()) / max(sum(gradient.numel() for gradient in other.values()), 1)
    found = {}
    for name, gradient in other.items():
        limit = noise * math.sqrt(max(squares[name] / max(gradient.numel(), 1), mean_square))
        largest = torch.maximum(gradient.abs(), own[name].to(gradient.dtype).abs())
        elements = (largest > 0) & (largest <= limit)
        if elements.any():
            found[name] = elements
    return found


def _explain_gradients(report: Report, recording: Recording) -> None:
    limit = report.tolerances.gradients
    wrong = _worst(report.gradients, limit)
    if not wrong:
        return
    differing = [name for name in wrong if recording.gradients.differing.get(name, (0, 0.0))[1]]
    if differing:
        ranks = sorted({recording.gradients.differing[name][0] for name in differing})
        report.findings.append(
            f"The reduced gradients of {_list(differing)} differ between ranks: rank {', '.join(map(str, ranks))} has"
            " others than rank 0. They were not reduced there, or ranks that must compute the same have computed"
            " something else, such as another mask."
        )
    factors = [report.factors[name] for name in wrong if name in report.factors]
    if factors and len(factors) == len(wrong) and max(factors) - min(factors) <= 2 * _PROPORTIONAL * abs(max(factors)):
        report.findings.append(
            f"The gradients of {_list(wrong)} are {factors[0]:.6g} times those of one process: they are divided by a"
            " wrong number, or summed where the mean is meant."
        )
        return
    missing = [name for name in wrong if name not in recording.gradients.tensors]
    if missing:
        report.findings.append(f"{_list(missing)} got no gradient, which one process computes.")
    others = [name for name in wrong if name not in differing and name not in missing]
    if others:
        report.findings.append(f"The gradients of {_list(others)} deviate, by up to {report.gradients[others[0]]:.1e}.")


def _explain_weights(report: Report, recording: Recording, reference: Reference) -> None:
    limits = report.tolerances
    wrong = _worst(report.weights, limits.weights)
    # The change of a weight whose gradient is wrong says nothing more.
    own = [name for name in wrong if report.gradients.get(name, 0.0) <= limits.gradients]
    stale = [
        name
        for name in own
        if torch.equal(recording.weights.tensors[name], recording.initial[name])
        and not torch.equal(reference.weights[name], recording.initial[name])
    ]
    if stale:
        report.findings.append(
            f"The optimizer step did not change {_list(stale)}, which it changes in one process: the optimizer holds"
            " other tensors than the module's parameters, such as those from before they were sharded."
        )
    differing = [name for name in own if recording.weights.differing.get(name, (0, 0.0))[1]]
    if differing:
        ranks = sorted({recording.weights.differing[name][0] for name in differing})
        report.findings.append(
            f"The weights of {_list(differing)} differ between ranks after the step, although their gradients do not:"
            f" rank {', '.join(map(str, ranks))} has others than rank 0."
        )
    others = [name for name in own if name not in stale and name not in differing]
    if others:
        report.findings.append(
            f"The weights of {_list(others)} deviate after the step, by up to {report.weights[others[0]]:.1e} of their"
            " change, although their gradients do not: gradient clipping or the optimizer computes something else."
        )


def _worst(deviations: Mapping[str, float], limit: float) -> list[str]:
    """Return the names with a deviation above ``limit``, the largest deviation first."""
    return sorted((name for name in deviations if deviations[name] > limit), key=lambda name: -deviations[name])


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
