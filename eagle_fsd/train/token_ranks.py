"""Rank tokens by their frequency in the answers of chats, for a head's draft vocabulary."""

from __future__ import annotations

from eagle_fsd.model.checkpoint import write_ranks
from eagle_fsd.train.config import RanksRequest
from eagle_fsd.train.dataset import count_answer_tokens, rank_by_frequency
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress


def rank_tokens(
    request: RanksRequest, *, token: str | None = None, progress: ProgressFactory = no_progress
) -> int:
    """Count the tokens of the answers, write the ranking, and return how many tokens occur.

    ``progress`` reports ``reading`` (in bytes) and ``counting`` (in chats).
    """
    if request.out.is_dir():
        raise OptionsError(f"out must be a file; got the folder {request.out}")
    request.out.parent.mkdir(parents=True, exist_ok=True)
    loaded = LoadedTarget.load(request, "cpu", token, layers=False)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, request.max_length, report)
    with progress("counting") as report:
        counts = count_answer_tokens(
            chats,
            range(len(chats)),
            vocab_size=loaded.target.vocab_size,
            workers=0,
            progress=report,
        )
    write_ranks(request.out, rank_by_frequency(counts))
    return int((counts > 0).sum())
