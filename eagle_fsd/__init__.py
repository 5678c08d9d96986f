"""Fuzzy Speculative Decoding (FSD) on draft trees.

Start with :class:`EagleFSD`: ``from_pretrained`` loads a target and a drafter, ``generate``,
``stream`` and ``generate_many`` decode. ``model`` holds the decoder, ``train`` trains draft heads,
``evaluation`` measures speed and quality, ``chat`` holds the terminal chat, the web page and the
servers, ``engines`` the plugins for other engines, ``cli`` is the command line, ``bundled`` a small
pair that needs no download, and ``utils`` shared helpers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_fsd.model.batch import Batch as Batch
    from eagle_fsd.model.batch import StreamChunk as StreamChunk
    from eagle_fsd.model.beam_search import BeamSearchOutput as BeamSearchOutput
    from eagle_fsd.model.config import AcceptanceConfig as AcceptanceConfig
    from eagle_fsd.model.config import SamplingConfig as SamplingConfig
    from eagle_fsd.model.config import TreeConfig as TreeConfig
    from eagle_fsd.model.drafters.draft_model import DraftModel as DraftModel
    from eagle_fsd.model.drafters.eagle import EagleHead as EagleHead
    from eagle_fsd.model.drafters.eagle3 import Eagle3Head as Eagle3Head
    from eagle_fsd.model.drafters.interface import Drafter as Drafter
    from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter as AdaptiveNGramDrafter
    from eagle_fsd.model.drafters.ngram import NGramDrafter as NGramDrafter
    from eagle_fsd.model.generation import Completion as Completion
    from eagle_fsd.model.generation import GenerateOutput as GenerateOutput
    from eagle_fsd.model.generation import Generation as Generation
    from eagle_fsd.model.loading import LoadError as LoadError
    from eagle_fsd.model.pipeline import EagleFSD as EagleFSD
    from eagle_fsd.model.prefix_cache import PrefixCache as PrefixCache
    from eagle_fsd.model.request import DecodeOptions as DecodeOptions
    from eagle_fsd.model.request import Prompt as Prompt
    from eagle_fsd.model.stats import DecodeStats as DecodeStats
    from eagle_fsd.model.step import TokenDetail as TokenDetail
    from eagle_fsd.model.verify import AcceptanceRule as AcceptanceRule
    from eagle_fsd.model.verify import Origin as Origin
    from eagle_fsd.model.weights import CheckpointError as CheckpointError
    from eagle_fsd.utils.options import OptionsError as OptionsError

__version__ = "0.3.0.dev0"

#: The module that defines each public name. Modules are imported on first use, because torch and
#: transformers take seconds to import and ``eagle-fsd --help`` does not need them.
_MODULES = {
    "AcceptanceConfig": "model.config",
    "AcceptanceRule": "model.verify",
    "AdaptiveNGramDrafter": "model.drafters.ngram",
    "Batch": "model.batch",
    "BeamSearchOutput": "model.beam_search",
    "CheckpointError": "model.weights",
    "Completion": "model.generation",
    "DecodeOptions": "model.request",
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
    "Prompt": "model.request",
    "SamplingConfig": "model.config",
    "StreamChunk": "model.batch",
    "TokenDetail": "model.step",
    "TreeConfig": "model.config",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
