"""The recipe that trains a head for a model of short stories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import STORIES

from eagle_fsd import EagleFSD
from eagle_fsd.train.config import TrainConfig
from recipes.stories import TEST_OPENINGS, openings, train_stories_head


def test_openings_are_distinct_and_always_the_same() -> None:
    found = openings()
    assert len(set(found)) == len(found) > 5 * TEST_OPENINGS
    assert found == openings()
    assert found != sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="the model of short stories is not there")
def test_target_writes_its_own_stories(tmp_path: Path) -> None:
    config = TrainConfig(max_length=64, epochs=1, batch_size=4, validation=0)
    train_stories_head(STORIES, tmp_path, 12, config)
    stories = (tmp_path / "stories.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(stories) == 12
    for story, opening in zip(stories, openings()[TEST_OPENINGS:], strict=False):
        assert opening in story
        assert len(story) > len(opening) + 200
    pair = EagleFSD.from_pretrained(STORIES, tmp_path / "head")
    ids = pair.tokenizer(openings()[0], return_tensors="pt")["input_ids"]
    out = pair.generate(ids, max_new_tokens=24)
    plain = pair.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert torch.equal(out.sequences, plain)
