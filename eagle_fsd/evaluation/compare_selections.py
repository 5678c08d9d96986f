"""Compare priced paths with the longest: ``python -m eagle_fsd.evaluation.compare_selections``.

Every setting answers the same prompts greedily. The table shows tau and the mean log-probability
of the emitted tokens under the target, with standard errors over answers (jackknife), and how much
larger tau is than that of FSD with ``selection="longest"`` at the same log-probability, with its
standard error (bootstrap over answers). FSD's tau between two settings is interpolated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle_fsd.bundled.problems import problems
from eagle_fsd.evaluation.tables import markdown
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import encode_prompt, load_chat_template

#: Thresholds and floors of FSD; the frontier that priced paths are compared with.
LONGEST = [
    *((threshold, 0.3) for threshold in (0.05, 0.1, 0.2, 0.3)),
    *((threshold, 0.1) for threshold in (0.1, 0.2, 0.3)),
    *((threshold, 0.05) for threshold in (0.2, 0.4)),
    (1.0, 0.02),
]
#: Prices without a gate, and with the gates of FSD.
PRICES = (3.0, 2.0, 1.5, 1.0, 0.75, 0.5)
GATES = ((0.1, 0.1), (0.3, 0.1))
#: Above every bounded divergence: the gate is always open.
NO_GATE = 1.0
BATCH = 16
RESAMPLES = 1000

#: Tokens, target passes and the sum of log-probabilities of every answer: ``[answers, 3]``.
Totals = NDArray[np.float64]


def main() -> None:
    """Measure every setting, and print a Markdown table."""
    parser = argparse.ArgumentParser(description="Compare priced paths with the longest.")
    parser.add_argument("--target", help="target; default: the bundled one")
    parser.add_argument("--drafter", help="drafter; default: the bundled head")
    parser.add_argument("--tree", type=int, nargs=3, metavar=("NODES", "DEPTH", "TOP_K"))
    parser.add_argument("--count", type=int, default=100, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=150, help="tokens per answer")
    parser.add_argument(
        "--stories",
        action="store_true",
        help="begin with 10 tokens sampled from the target instead of with the bundled problems",
    )
    options = parser.parse_args()
    model = EagleFSD.from_pretrained(options.target, options.drafter)
    if options.tree:
        names = ("total_tokens", "depth", "top_k")
        model.tree = model.tree.updated(**dict(zip(names, options.tree, strict=True)))
    prompts = stories(model, options.count) if options.stories else questions(model, options.count)
    settings = {"exact": AcceptanceConfig()}
    for threshold, ratio in LONGEST:
        name = f"T={threshold:g} r={ratio:g}"
        settings[name] = AcceptanceConfig(threshold=threshold, min_ratio=ratio)
    for threshold, ratio in ((NO_GATE, 0.0), *GATES):
        for price in PRICES:
            gate = "no gate" if threshold == NO_GATE else f"T={threshold:g} r={ratio:g}"
            settings[f"price {price:g}, {gate}"] = AcceptanceConfig(
                threshold=threshold, min_ratio=ratio, selection="priced", price=price
            )
    totals = {}
    for name, acceptance in settings.items():
        totals[name] = measure(model, prompts, acceptance, options.max_new_tokens)
        sys.stderr.write(f"{name}: {tau(totals[name]):.2f}\n")
    frontier = [totals[name] for name in list(settings)[: 1 + len(LONGEST)]]
    sys.stdout.write(format_table(totals, frontier) + "\n")


def questions(model: EagleFSD, count: int) -> list[Tensor]:
    """Return ``[S]`` token ids of unseen bundled problems.

    Args:
        model: The pair.
        count: Number of problems.
    """
    chats = [[{"role": "user", "content": item.question}] for item in problems("test", count)]
    template = load_chat_template(model.tokenizer)
    return [encode_prompt(chat, model.tokenizer, template)[0] for chat in chats]


def stories(model: EagleFSD, count: int) -> list[Tensor]:
    """Return ``[S]`` token ids of beginnings sampled from the target.

    Args:
        model: The pair.
        count: Number of beginnings.
    """
    start = torch.full((count, 1), model.tokenizer.bos_token_id)
    sampling = SamplingConfig(temperature=1.0, seed=0)
    out = model.generate(start, torch.ones_like(start), 10, method="ar", sampling=sampling)
    return list(out.sequences)


def measure(
    model: EagleFSD, prompts: Sequence[Tensor], acceptance: AcceptanceConfig, max_new_tokens: int
) -> Totals:
    """Answer every prompt greedily.

    Args:
        model: The pair.
        prompts: ``[S]`` token ids of each prompt.
        acceptance: Acceptance options.
        max_new_tokens: Maximum number of tokens per answer.

    Returns:
        ``[answers, 3]``: tokens, target passes, and the sum of log-probabilities in nats.
    """
    totals = np.zeros((len(prompts), 3))
    for item in model.generate_many(
        prompts, max_new_tokens, max_batch=BATCH, acceptance=acceptance, details=0
    ):
        log_probs = sum(detail.log_prob for detail in item.details)
        totals[item.index] = len(item.tokens), item.stats.steps, log_probs
    return totals


def tau(totals: Totals) -> float:
    """Return the number of tokens per target pass.

    Args:
        totals: The result of :func:`measure`.
    """
    return float(totals[:, 0].sum() / totals[:, 1].sum())


def log_prob(totals: Totals) -> float:
    """Return the mean log-probability of a token.

    Args:
        totals: The result of :func:`measure`.
    """
    return float(totals[:, 2].sum() / totals[:, 0].sum())


def gain(totals: Totals, frontier: Sequence[Totals]) -> float:
    """Return tau minus the frontier's tau at the same log-probability.

    Args:
        totals: The result of :func:`measure`.
        frontier: The results of the settings to compare with. Settings that another one exceeds in
            both quantities are left out, and the others are connected by lines.

    Returns:
        The difference; NaN if the frontier ends at a larger log-probability.
    """
    best: list[tuple[float, float]] = []
    for point in sorted(((log_prob(item), tau(item)) for item in frontier), reverse=True):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    quality, speed = zip(*reversed(best), strict=True)
    if log_prob(totals) < quality[0]:
        return float("nan")
    return tau(totals) - float(np.interp(log_prob(totals), quality, speed))


def format_table(totals: dict[str, Totals], frontier: Sequence[Totals]) -> str:
    """Format the results as a Markdown table.

    Args:
        totals: Results of :func:`measure` by setting.
        frontier: Those that the gain refers to.
    """
    headers = ["setting", "tau", "log-probability", "tau above FSD's at the same log-probability"]
    lines = []
    random = np.random.default_rng(0)
    count = len(frontier[0])
    samples = [random.integers(count, size=count) for _ in range(RESAMPLES)]
    for name, item in totals.items():
        cells = [
            f"{statistic(item):.3f} ± {_jackknife(item, statistic):.3f}"
            for statistic in (tau, log_prob)
        ]
        cell, above = "", gain(item, frontier)
        if name.startswith("price") and not np.isnan(above):
            found = [gain(item[rows], [other[rows] for other in frontier]) for rows in samples]
            cell = f"{above:+.3f} ± {np.nanstd(found):.3f}"
        lines.append([name, *cells, cell])
    return markdown(headers, lines)


def _jackknife(totals: Totals, statistic: Callable[[Totals], float]) -> float:
    """Return the standard error of a statistic over answers."""
    count = len(totals)
    found = [statistic(np.delete(totals, index, 0)) for index in range(count)]
    return float(np.sqrt((count - 1) * np.var(found)))


if __name__ == "__main__":
    main()
