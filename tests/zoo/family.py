"""What a family of Hugging Face models is, and how a tiny one with random weights is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "BATCH_SIZE",
    "LENGTH",
    "VOCAB",
    "Batch",
    "Family",
    "config_of",
    "images",
    "labels",
    "masked",
    "seq2seq",
    "text",
]

VOCAB, LENGTH, BATCH_SIZE = 64, 8, 2

Batch = dict[str, Tensor]
MakeBatch = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        name: The family's name in the table.
        kind: What its models do, such as ``causal`` or ``vision``.
        model: Name of the model's class in ``transformers``.
        config: Makes the configuration.
        batch: Makes the keyword arguments of one forward, with as many samples as a microbatch has.
        packed: Keyword arguments whose dimension 0 is not the number of samples, to their number of rows per sample.
        options: Keyword arguments of every forward.
    """

    name: str
    kind: str
    model: str
    config: Callable[[], Any]
    batch: MakeBatch
    packed: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Make the model, without anything that draws random numbers, and far from the symmetry of small weights."""
        import transformers

        torch.manual_seed(seed)
        config = self.config()
        _switch_randomness_off(config)
        model: nn.Module = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn(param.shape))
        return model


def config_of(name: str, **values: Any) -> Callable[[], Any]:
    """Return what makes a configuration of the class ``name``; ``values`` may be functions that make other ones."""

    def make() -> Any:
        import transformers

        made = {key: value() if callable(value) else value for key, value in values.items()}
        return getattr(transformers, name)(**made)

    return make


def _switch_randomness_off(config: Any) -> None:
    """Set everything that drops or masks at random to zero, in ``config`` and in the configurations inside it."""
    values = vars(config)
    for key, value in list(values.items()):
        if hasattr(value, "to_dict") and value is not config:
            _switch_randomness_off(value)
        elif isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, key, 0.0)
    if "apply_spec_augment" in values:
        config.apply_spec_augment = False


def labels(num_labels: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    """Return what draws labels of a batch, each of ``shape``."""
    return lambda generator: torch.randint(num_labels, (BATCH_SIZE, *shape), generator=generator)


def text(generator: torch.Generator, low: int = 4) -> Batch:
    """Make tokens that are to be predicted from themselves."""
    tokens = torch.randint(low, VOCAB, (BATCH_SIZE, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def masked(generator: torch.Generator) -> Batch:
    """Make tokens, some of which are masked and to be predicted, and padding at the end of the last sample."""
    batch = text(generator)
    attended = torch.ones_like(batch["input_ids"])
    attended[-1, -2:] = 0
    wanted = batch["labels"].clone()
    wanted[:, 1::2] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": attended, "labels": wanted}


def seq2seq(generator: torch.Generator) -> Batch:
    """Make tokens of a source with padding, and those of a target."""
    source = masked(generator)
    return {**source, "labels": torch.randint(4, VOCAB, (BATCH_SIZE, LENGTH), generator=generator)}


def images(size: int, **more: Callable[[torch.Generator], Tensor]) -> MakeBatch:
    """Return what makes square images of ``size``, and ``more`` beside them."""

    def make(generator: torch.Generator) -> Batch:
        pixels = torch.randn(BATCH_SIZE, 3, size, size, generator=generator)
        return {"pixel_values": pixels, **{key: draw(generator) for key, draw in more.items()}}

    return make
