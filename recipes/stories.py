"""Train a draft head for a base model of short stories, such as karpathy's TinyStories models.

The target writes its own training text: it continues generated openings. ``benchmarks/revisions.py
--stories TARGET`` trains a head for the model of 260 k parameters (5 layers, a vocabulary of 512).
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from eagle_fsd.model.config import TargetOptions
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, TrainConfig, TrainRequest
from eagle_fsd.train.regenerate import regenerate
from eagle_fsd.train.run import train
from eagle_fsd.train.training_folder import TrainingFolder
from recipes.publish import write_questions

#: A FastChat template that adds nothing: the answer continues the question's text.
TEMPLATE = "raw"
#: Openings that the head is not trained on.
TEST_OPENINGS = 200
#: Stories that it is trained on.
STORIES = 896
_BEGINNINGS = ("Once upon a time, there was", "One day,", "There once was")
_ADJECTIVES = ("little", "big", "happy", "kind", "brave", "shy", "funny", "sad")
_CHARACTERS = ("girl", "boy", "cat", "dog", "bird", "bear", "rabbit", "mouse")
_NAMES = ("Lily", "Tim", "Mia", "Max", "Sue", "Ben", "Anna", "Tom", "Lucy", "Sam")
_CONFIG = TrainConfig(max_length=512, batch_size=16)


def openings() -> list[str]:
    """Return the openings in random order; the first :data:`TEST_OPENINGS` are for tests."""
    parts = itertools.product(_BEGINNINGS, _ADJECTIVES, _CHARACTERS, _NAMES)
    found = [f"{begin} a {kind} {who} named {name}." for begin, kind, who, name in parts]
    random.Random(0).shuffle(found)
    return found


def train_stories_head(
    target: Path, out: Path, count: int = STORIES, config: TrainConfig = _CONFIG
) -> None:
    """Have the target write stories, and train an EAGLE-2 head on them in the folder ``head``."""
    out.mkdir(parents=True, exist_ok=True)
    prompts, stories, folder = out / "openings.jsonl", out / "stories.jsonl", out / "head"
    write_questions(prompts, openings()[TEST_OPENINGS : TEST_OPENINGS + count])
    options = TargetOptions(target=target, chat_template=TEMPLATE).model_dump(exclude_unset=True)
    regenerate(
        RegenerateRequest(data=prompts, out=stories, **options),
        RegenerateConfig(temperature=1.0, batch_size=128, max_new_tokens=256),
    )
    resume = TrainingFolder(folder).exists
    request = TrainRequest(data=stories, out=folder, resume=resume, **options)
    train(request, config)
