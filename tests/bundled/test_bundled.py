"""The bundled pair: its files, and the accuracy and speed that its model cards state."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BatchEncoding

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import (
    BUNDLED,
    BUNDLED_DRAFT_MODEL,
    BUNDLED_EAGLE3,
    BUNDLED_HEAD,
    BUNDLED_TARGET,
    SMOLLM2_HEADS,
)
from eagle_fsd.bundled.problems import Problem, chat_messages, problems
from eagle_fsd.evaluation.scoring import final_number, same_number
from eagle_fsd.model.loading import load_tokenizer
from recipes.target import save_target


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    """The pair as the model cards measure it, also on machines with a GPU."""
    return EagleFSD.from_pretrained(dtype=torch.float32, device_map="cpu")


def encode(model: EagleFSD, prompts: Sequence[str]) -> BatchEncoding:
    return model.tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )


def answer(model: EagleFSD, prompts: Sequence[str], **options: object) -> tuple[list[str], float]:
    """Return the answers and the tokens per target pass."""
    encoded = encode(model, prompts)
    output = model.generate(**encoded, **options)
    new = output.sequences[:, encoded["input_ids"].shape[1] :]
    return model.tokenizer.batch_decode(new, skip_special_tokens=True), output.stats.tau


def measure(
    model: EagleFSD, sample: Sequence[Problem], batch: int = 50, **options: object
) -> tuple[float, float]:
    """Return the accuracy on problems, and the tokens per target pass averaged over batches."""
    model = copy.copy(model)
    model.batch_trees = {}  # the model cards are those of single prompts
    correct, taus = 0, []
    for start in range(0, len(sample), batch):
        part = sample[start : start + batch]
        answers, tau = answer(model, [problem.question for problem in part], **options)
        correct += sum(
            same_number(final_number(text), str(problem.final))
            for text, problem in zip(answers, part, strict=True)
        )
        taus.append(tau)
    return correct / len(sample), sum(taus) / len(taus)


def card_figures(part: str) -> dict[str, tuple[float, float]]:
    """Return accuracy and tau of each row in a model card's table."""
    card = (BUNDLED / part / "README.md").read_text()
    rows = re.findall(r"^\| (\w+)[^|]*\| [\d/]+ \| ([\d.]+)% \| ([\d.]+) \|$", card, re.MULTILINE)
    return {name: (float(accuracy) / 100, float(tau)) for name, accuracy, tau in rows}


def test_files_are_small_and_in_half_precision() -> None:
    """Heads do not contain the embedding of their target."""
    names = {"README.md", "config.json", "model.safetensors", "training.json"}
    for folder, size, dtype in (
        (BUNDLED_TARGET, 8_000_000, torch.float16),
        (BUNDLED_HEAD, 1_000_000, torch.float16),
        (BUNDLED_EAGLE3, 1_000_000, torch.float16),
        (BUNDLED_DRAFT_MODEL, 2_000_000, torch.float16),
        *((folder, 16_000_000, torch.bfloat16) for folder in SMOLLM2_HEADS.values()),
    ):
        assert names <= {path.name for path in folder.iterdir()}
        assert (folder / "model.safetensors").stat().st_size < size
        weights = load_file(folder / "model.safetensors")
        assert {item.dtype for item in weights.values() if item.is_floating_point()} == {dtype}
        assert not any(name.startswith("embed_tokens") for name in weights)
        assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_tokenizer_round_trip(model: EagleFSD) -> None:
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
    chat = [*chat_messages(("hello", "Hello!")), {"role": "user", "content": "thanks"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|begin|><|user|>hello<|end|><|assistant|>Hello!<|end|><|user|>thanks<|end|><|assistant|>"
    )
    (text,), _ = answer(model, ["what can you do?"], max_new_tokens=64, threshold=0.0)
    assert "word problems" in text


def test_transformers_4_can_load_the_files(model: EagleFSD, tmp_path: Path) -> None:
    """Settings have the names of transformers 4, and the recipe saves the committed target."""
    for part, dtype in (("target", "float32"), ("head", "float16"), ("eagle3", "float16")):
        config = json.loads((BUNDLED / part / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert config["rope_scaling"] is None
        assert config["torch_dtype"] == dtype
    save_target(copy.deepcopy(model.model), load_tokenizer(BUNDLED_TARGET), tmp_path)
    for folder in (tmp_path, BUNDLED_TARGET):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    contents = [
        {**json.loads((folder / "config.json").read_text()), "transformers_version": None}
        for folder in (tmp_path, BUNDLED_TARGET)
    ]
    assert contents[0] == contents[1]
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / file).read_text() == (BUNDLED_TARGET / file).read_text()
    saved = load_file(tmp_path / "model.safetensors")
    committed = load_file(BUNDLED_TARGET / "model.safetensors")
    assert saved.keys() == committed.keys()
    assert all(torch.equal(saved[name], committed[name]) for name in saved)


def test_exact_decoding_equals_hugging_face(model: EagleFSD) -> None:
    encoded = encode(model, [problem.question for problem in problems("test", 2, seed=0)])
    ours = model.generate(**encoded, max_new_tokens=64, threshold=0.0).sequences
    theirs = model.model.generate(**encoded, max_new_tokens=64, do_sample=False)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("count", "tolerance"), [(12, 0.1), pytest.param(100, 0.04, marks=pytest.mark.slow)]
)
def test_a_sample_agrees_with_the_model_cards(
    model: EagleFSD, count: int, tolerance: float
) -> None:
    """The cards are those of 500 problems, whose accuracy has a standard error of 0.7 points."""
    cards = card_figures("target")
    assert cards == card_figures("head")
    sample = problems("test", count, seed=0)
    exact, shipped = measure(model, sample, threshold=0.0), measure(model, sample)
    assert shipped[0] >= exact[0] - 1 / count
    for found, (accuracy, tau) in ((exact, cards["exact"]), (shipped, cards["threshold"])):
        assert found[0] >= accuracy - 1 / 16
        assert found[1] == pytest.approx(tau, rel=tolerance)
