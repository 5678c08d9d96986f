"""The pair that ships with the package: what it is, and the floors it has to reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED, BUNDLED_HEAD
from eagle_fsd.bundled.problems import problems
from eagle_fsd.bundled.quality import decode_answers, encode_problems, measure_quality
from eagle_fsd.model.config import FSDSettings

UNSEEN = problems("test", 500, seed=0)


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    return EagleFSD.from_pretrained(dtype=torch.float32, device_map="cpu")


def test_shape_and_size(model: EagleFSD) -> None:
    config = model.model.config
    assert config.model_type == "llama"
    assert 12 <= config.num_hidden_layers <= 16
    assert 128 <= config.hidden_size <= 192
    assert 3e6 <= sum(p.numel() for p in model.model.parameters()) <= 8e6
    files = list(BUNDLED.rglob("*.safetensors"))
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) <= 20e6
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}
    for part in ("target", "head"):
        card = (BUNDLED / part / "README.md").read_text()
        for word in ("accuracy", "tau", "minutes", '"seed"', "steps", "torch"):
            assert word in card


def test_tokenizer(model: EagleFSD) -> None:
    tokenizer = model.tokenizer
    assert 1000 <= len(tokenizer) <= 4096
    for text in (
        "1234567890",
        "Mia pays 17 dollars.",
        "naïve \U0001f600 日本",
        "  two  spaces\n\n",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024", add_special_tokens=False))
    assert digits == ["2", "0", "2", "4"]


def test_chat_template_marks_turns(model: EagleFSD) -> None:
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "thanks"},
    ]
    text = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|begin|><|user|>hello<|end|><|assistant|>Hello!<|end|><|user|>thanks<|end|><|assistant|>"
    )


def test_lossless_greedy_equals_hugging_face_on_200_problems(model: EagleFSD) -> None:
    """Token for token, in float32, whatever the mix of lengths in a batch."""
    for start in range(0, 200, 50):
        encoded = encode_problems(model.tokenizer, UNSEEN[start : start + 50])
        ours = model.generate(**encoded, max_new_tokens=256, threshold=0.0).sequences
        theirs = model.model.generate(**encoded, max_new_tokens=256, do_sample=False)
        assert torch.equal(ours, theirs)


def test_floors_and_the_gain_of_the_shipped_settings(model: EagleFSD) -> None:
    """On 500 unseen problems, greedy, float32.

    The target answers 85 % or more; exact decoding reaches tau 3.5 or more; FSD reaches 1.25 times
    that and loses at most 2 points. The settings that ship were calibrated to lose less than one:
    they reach 1.2 times.
    """
    exact = measure_quality(model, UNSEEN, batch=50, threshold=0.0)
    fuzzy = measure_quality(model, UNSEEN, batch=50, threshold=0.2, min_ratio=0.1)
    shipped = measure_quality(model, UNSEEN, batch=50)
    assert model.settings.threshold > 0
    assert shipped.tau >= 1.2 * exact.tau
    assert shipped.accuracy >= exact.accuracy - 0.01
    assert exact.origins["fuzzy"] == 0
    assert exact.accuracy >= 0.85
    assert exact.tau >= 3.5
    assert fuzzy.tau >= 1.25 * exact.tau
    assert fuzzy.accuracy >= exact.accuracy - 0.02


def test_small_talk_is_answered(model: EagleFSD) -> None:
    encoded = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "what can you do?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**encoded, max_new_tokens=64, threshold=0.0)
    [answer] = decode_answers(model.tokenizer, out.sequences[:, encoded["input_ids"].shape[1] :])
    assert "word problems" in answer


def test_settings_are_read_from_beside_the_head(model: EagleFSD) -> None:
    shape = FSDSettings.for_device("cpu")
    assert model.settings != shape
    assert (model.settings.total_tokens, model.settings.depth, model.settings.top_k) == (
        shape.total_tokens,
        shape.depth,
        shape.top_k,
    )
    assert Path(BUNDLED_HEAD / "fsd.json").is_file()
