"""Fuzzy Speculative Decoding (FSD) on draft trees.

Start with :class:`EagleFSD`: ``from_pretrained`` loads a target and a drafter, ``generate``,
``stream`` and ``generate_many`` decode. ``model`` holds the decoder, ``train`` trains draft heads,
``evaluation`` measures speed and quality, ``chat`` holds the terminal chat, the web page and the
servers, ``cli`` is the command line, ``bundled`` a small pair that needs no download, and ``utils``
shared helpers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_fsd.model.beam_search import BeamSearchOutput
    from eagle_fsd.model.checkpoint import CheckpointError
    from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
    from eagle_fsd.model.drafters.draft_model import DraftModel
    from eagle_fsd.model.drafters.eagle import EagleHead
    from eagle_fsd.model.drafters.eagle3 import Eagle3Head
    from eagle_fsd.model.drafters.interface import Drafter
    from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter
    from eagle_fsd.model.engine import TokenDetail
    from eagle_fsd.model.generation import Batch, GenerateOutput, Generation, StreamChunk
    from eagle_fsd.model.loading import LoadError
    from eagle_fsd.model.pipeline import Completion, DecodeOptions, EagleFSD, Prompt
    from eagle_fsd.model.prefix_cache import PrefixCache
    from eagle_fsd.model.stats import DecodeStats
    from eagle_fsd.model.verify import AcceptanceRule, Origin
    from eagle_fsd.utils.options import OptionsError

__version__ = "0.2.0"

#: The module that defines each public name. Modules are imported on first use, because torch and
#: transformers take seconds to import and ``eagle-fsd --help`` does not need them.
_MODULES = {
    "AcceptanceConfig": "model.config",
    "AcceptanceRule": "model.verify",
    "AdaptiveNGramDrafter": "model.drafters.ngram",
    "Batch": "model.generation",
    "BeamSearchOutput": "model.beam_search",
    "CheckpointError": "model.checkpoint",
    "Completion": "model.pipeline",
    "DecodeOptions": "model.pipeline",
    "DecodeStats": "model.stats",
    "DraftModel": "model.drafters.draft_model",
    "Drafter": "model.drafters.interface",
    "Eagle3Head": "model.drafters.eagle3",
    "EagleFSD": "model.pipeline",
    "EagleHead": "model.drafters.eagle",
    "GenerateOutput": "model.generation",
    "Generation": "model.generation",
    "LoadError": "model.loading",
    "NGramDrafter": "model.drafters.ngram",
    "OptionsError": "utils.options",
    "Origin": "model.verify",
    "PrefixCache": "model.prefix_cache",
    "Prompt": "model.pipeline",
    "SamplingConfig": "model.config",
    "StreamChunk": "model.generation",
    "TokenDetail": "model.engine",
    "TreeConfig": "model.config",
}
__all__ = [
    "AcceptanceConfig",
    "AcceptanceRule",
    "AdaptiveNGramDrafter",
    "Batch",
    "BeamSearchOutput",
    "CheckpointError",
    "Completion",
    "DecodeOptions",
    "DecodeStats",
    "DraftModel",
    "Drafter",
    "Eagle3Head",
    "EagleFSD",
    "EagleHead",
    "GenerateOutput",
    "Generation",
    "LoadError",
    "NGramDrafter",
    "OptionsError",
    "Origin",
    "PrefixCache",
    "Prompt",
    "SamplingConfig",
    "StreamChunk",
    "TokenDetail",
    "TreeConfig",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
