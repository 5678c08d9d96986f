"""Fuzzy Speculative Decoding on EAGLE-2 draft trees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_fsd.model.checkpoint import CheckpointError
    from eagle_fsd.model.config import FSDSettings
    from eagle_fsd.model.drafters.eagle import EagleHead
    from eagle_fsd.model.generation import GenerateOutput, StreamChunk
    from eagle_fsd.model.loading import LoadError
    from eagle_fsd.model.pipeline import EagleFSD
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

_MODULES = {
    "CheckpointError": "checkpoint",
    "EagleFSD": "pipeline",
    "EagleHead": "drafters.eagle",
    "FSDSettings": "config",
    "GenerateOutput": "generation",
    "LoadError": "loading",
    "Origin": "verify",
    "StreamChunk": "generation",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for.

    torch and transformers take seconds to import, which ``eagle-fsd --help`` has no use for.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.model.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
