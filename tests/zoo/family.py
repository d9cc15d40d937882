"""Define a family of Hugging Face models, and make tiny models and batches of it."""

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
    """Describe a family of models.

    Args:
        name: Name of the family in the table.
        kind: Kind of the family's models, such as ``causal`` or ``vision``, for the table.
        model: Name of the model's class in ``transformers``.
        config: Function that makes the model's configuration.
        batch: Function that makes the keyword arguments of one forward, with the samples of one microbatch.
        packed: Number of rows per sample of each keyword argument whose dimension 0 is not the number of samples.
        options: Further keyword arguments of every forward, which do not depend on the batch.
    """

    name: str
    kind: str
    model: str
    config: Callable[[], Any]
    batch: MakeBatch
    packed: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Make the model, without dropout or random masks.

        Noise is added to the weights, because small initial weights are so symmetric that errors would not show.
        """
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
    """Return a function that makes a configuration of the class ``name``.

    A value that is a function is called, and its result is used; so configurations can be nested.
    """

    def make() -> Any:
        import transformers

        made = {key: value() if callable(value) else value for key, value in values.items()}
        return getattr(transformers, name)(**made)

    return make


def _switch_randomness_off(config: Any) -> None:
    """Disable dropout and random masks in ``config`` and in the configurations nested in it."""
    values = vars(config)
    for key, value in list(values.items()):
        if hasattr(value, "to_dict") and value is not config:
            _switch_randomness_off(value)
        elif isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, key, 0.0)
    if "apply_spec_augment" in values:
        config.apply_spec_augment = False


def labels(num_labels: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    """Return a function that draws the labels of a batch, with ``shape`` for each sample."""
    return lambda generator: torch.randint(num_labels, (BATCH_SIZE, *shape), generator=generator)


def text(generator: torch.Generator, low: int = 4) -> Batch:
    """Make random tokens, which are also the labels."""
    tokens = torch.randint(low, VOCAB, (BATCH_SIZE, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def masked(generator: torch.Generator) -> Batch:
    """Make tokens with every second position left out of the labels, and with padding in the last sample."""
    batch = text(generator)
    attended = torch.ones_like(batch["input_ids"])
    attended[-1, -2:] = 0
    wanted = batch["labels"].clone()
    wanted[:, 1::2] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": attended, "labels": wanted}


def seq2seq(generator: torch.Generator) -> Batch:
    """Make source tokens with padding, and target tokens as labels."""
    source = masked(generator)
    return {**source, "labels": torch.randint(4, VOCAB, (BATCH_SIZE, LENGTH), generator=generator)}


def images(size: int, **more: Callable[[torch.Generator], Tensor]) -> MakeBatch:
    """Return a function that makes a batch of images of ``size`` x ``size`` pixels and the further tensors ``more``."""

    def make(generator: torch.Generator) -> Batch:
        pixels = torch.randn(BATCH_SIZE, 3, size, size, generator=generator)
        return {"pixel_values": pixels, **{key: draw(generator) for key, draw in more.items()}}

    return make
