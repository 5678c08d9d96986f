"""Load a drafter by its name, whatever its kind."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eagle_fsd.model.checkpoint import (
    CheckpointError,
    load_head,
    read_config,
    select_tokens,
    tensor_names,
)
from eagle_fsd.model.drafters.draft_model import load_draft_model
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter
from eagle_fsd.model.eagle3_checkpoint import is_eagle3, load_eagle3
from eagle_fsd.model.target import Target

#: Drafters without files, by name.
WITHOUT_FILES: dict[str, type[Drafter]] = {
    "ngram": NGramDrafter,
    "adaptive-ngram": AdaptiveNGramDrafter,
}


def load_drafter(
    name: str | Path,
    target: Target,
    token: str | None = None,
    draft_vocabulary: int | str | Path | None = None,
) -> Drafter:
    """Load a drafter and attach it to its target.

    ``name`` is a key of :data:`WITHOUT_FILES`, or a folder or a Hub name with an EAGLE-1/2 or
    EAGLE-3 head or a causal LM; which one follows from ``config.json`` and the tensors' names.
    ``draft_vocabulary`` restricts an EAGLE-1/2 head to some of the target's tokens, see
    :func:`select_tokens`; other drafters raise ValueError.
    """
    drafter = _load(name, target, token)
    if draft_vocabulary is not None:
        if not isinstance(drafter, EagleHead):
            raise ValueError(f"draft_vocabulary requires an EAGLE-1/2 head; {name} is not one")
        tokens = select_tokens(draft_vocabulary, name, target.vocab_size, token)
        drafter.restrict_vocabulary(tokens)
    return drafter


def _load(name: str | Path, target: Target, token: str | None) -> Drafter:
    """Load a drafter, whose kind its name or its files show."""
    if str(name) in WITHOUT_FILES:
        return WITHOUT_FILES[str(name)]().attach(target)
    values, names = read_config(name, token), tensor_names(name, token)
    if is_eagle3(values, names):
        return load_eagle3(name, target, token=token)
    if any(item.removeprefix("model.").startswith("fc.") for item in names):
        return load_head(name, target, token=token)
    family = str(values.get("model_type"))
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return load_draft_model(name, target, token)
    raise CheckpointError(
        f"{name} holds neither an EAGLE head (no tensor fc.*) nor a causal LM (model_type {family})"
    )
