"""Convert a run's parameters to the form that MLflow accepts: flat, with valid names, and of limited length."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.plugins._compat import INSTANTIATOR

MAX_PARAM_LENGTH = 6000


def flat_params(params: dict[str, Any] | Namespace | None) -> dict[str, str]:
    """Return the parameters that are not None as text, with dotted names that MLflow accepts."""
    named = {} if params is None else vars(params) if isinstance(params, Namespace) else params
    # LightningCLI adds this entry for load_from_checkpoint; it is not a parameter of the module.
    named = {key: value for key, value in named.items() if key != INSTANTIATOR}
    return {allowed_name(key): param_text(key, value) for key, value in flatten(named) if value is not None}


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values. A list is flattened only if it contains mappings or Namespaces."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif isinstance(value, Namespace):
        value = vars(value)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, Namespace)) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, child in value.items():
        yield from flatten(child, f"{prefix}.{key}" if prefix else str(key))


def param_text(name: str, value: Any) -> str:
    """Return a value as the text that MLflow stores; text that is too long is cut with a warning."""
    text = str(value)
    if len(text) > MAX_PARAM_LENGTH:
        rank_zero_warn(f"MLflow keeps {MAX_PARAM_LENGTH} characters of a parameter: {name} has {len(text)} and is cut.")
        text = text[: MAX_PARAM_LENGTH - 1] + "…"
    return text


def allowed_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names of metrics and parameters."""
    allowed = re.sub(r"[^\w/. :-]", "_", name)
    if allowed != name:
        rank_zero_warn(f"MLflow does not take the name {name!r}: logged as {allowed!r}.", category=RuntimeWarning)
    return allowed
