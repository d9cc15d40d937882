"""Collect all families by name."""

from tests.zoo.family import Family
from tests.zoo.media import MULTIMODAL, SPEECH, VISION
from tests.zoo.text import CAUSAL, ENCODERS, EXPERTS, SEQ2SEQ, STATE_SPACE

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for families in (CAUSAL, EXPERTS, STATE_SPACE, ENCODERS, SEQ2SEQ, VISION, SPEECH, MULTIMODAL)
    for family in families
}
