"""Train EAGLE draft heads.

Start with ``run.py`` (:func:`train`: from a chat file and a target to a head) and ``config.py``
(its options). Training reads chats (``chat_file``), tokenizes them and marks the assistant's tokens
(``assistant_mask``), batches them (``dataset``), computes or loads the target's hidden states
(``loaded_target``, ``features``, ``feature_store``), and optimizes the head (``heads``, ``losses``,
``trainer``, ``validation``). It writes checkpoints and metrics to a folder (``training_folder``),
with a record, a model card and plots (``record``, ``model_card``, ``curves``).
``regenerate`` rewrites chats, ``synthesize`` writes new ones (both with ``writing``),
``token_ranks`` ranks tokens, ``export`` converts a head for other engines, and ``configs`` holds
files for ``accelerate launch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_fsd.train.config import TrainConfig, TrainRequest

if TYPE_CHECKING:
    from eagle_fsd.train.run import train

__all__ = ["TrainConfig", "TrainRequest", "train"]


def __getattr__(name: str) -> Any:
    """Import :func:`train` on first use: it needs torch, and the options do not."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle_fsd.train.run import train

    return train
