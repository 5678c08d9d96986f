"""The options of an evaluation's decoding, declared once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_fsd.utils.options import Options, number


@dataclass(frozen=True)
class Decoding(Options):
    """How answers are drawn, the same for every method."""

    max_new_tokens: int = number(512, 1, math.inf, "tokens of a turn at most")
    temperature: float = number(0.0, 0.0, math.inf, "0 is greedy")
    top_p: float = number(1.0, 0.0, 1.0, "nucleus sampling; 1 is off")
    top_k: int = number(0, 0, math.inf, "sample from the k likeliest; 0 is off")
    seed: int = number(0, 0, 2**31, "of sampling, and of the bundled problems")
    batch: int = number(1, 1, 1024, "questions answered at once; speeds are this batch's")
