"""Prompts that no bundled model was trained on."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_fsd.bundled.problems import problems


def unseen_prompts(tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of 32 problems."""
    chats = [[{"role": "user", "content": item.question}] for item in problems("test", 32, seed)]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"], encoded["attention_mask"]
