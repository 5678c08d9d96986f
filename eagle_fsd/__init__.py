"""Fuzzy Speculative Decoding on EAGLE-2 draft trees."""

from eagle_fsd.model.checkpoint import CheckpointError
from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.head import EagleHead
from eagle_fsd.model.loading import LoadError
from eagle_fsd.model.loop import GenerateOutput, StreamChunk
from eagle_fsd.model.settings import FSDSettings
from eagle_fsd.model.verify import Origin

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "EagleFSD",
    "EagleHead",
    "FSDSettings",
    "GenerateOutput",
    "LoadError",
    "Origin",
    "StreamChunk",
]
