"""Ranking tokens by the answers of chats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from eagle_fsd.train.chat_file import write_chats
from eagle_fsd.train.config import RanksRequest
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.train.token_ranks import rank_tokens


def test_tokens_of_answers_are_ranked_by_frequency(tmp_path: Path) -> None:
    """Counted again with the data set's own masks; unseen tokens follow in ascending order."""
    write_chats(tmp_path / "chats.jsonl", 20, 3)
    request = RanksRequest(data=tmp_path / "chats.jsonl", out=tmp_path / "head" / "ranks")
    occurring = rank_tokens(request)
    ranks = load_file(request.out)["tokens"].tolist()
    loaded = LoadedTarget.load(request, "cpu", layers=False)
    counts: Counter[int] = Counter()
    for example in loaded.open_chats(request.data, request.max_length):
        pairs = zip(example.ids, example.assistant_mask, strict=True)
        counts.update(int(token) for token, is_answer in pairs if is_answer)
    assert occurring == len(counts)
    assert ranks == sorted(range(loaded.target.vocab_size), key=lambda id_: (-counts[id_], id_))
