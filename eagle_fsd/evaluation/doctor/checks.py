"""Look for causes of a low tau.

The settings of a drafter are checked by changing one at a time: the change that raises the
agreement most, and clearly, names the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

import torch
from torch import Tensor

from eagle_fsd.evaluation.doctor.agreement import CHUNK, Agreement
from eagle_fsd.evaluation.doctor.measurements import MeasuredAnswer, Measurements, complete_steps
from eagle_fsd.evaluation.doctor.settings import DrafterSetting, find_settings
from eagle_fsd.evaluation.doctor.templates import candidate_templates, unknown_markers
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.probe import describe_closed_gate
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.utils.chat_templates import encode_prompt
from eagle_fsd.utils.errors import is_out_of_memory

#: A mean must change by this many standard errors.
MIN_ERRORS = 3.0
#: A vocabulary map estimated from the answers must reach this agreement and raise it by this much.
#: Such a map also learns what the answers repeat.
MIN_ESTIMATED, MIN_ESTIMATED_GAIN = 0.4, 0.2
#: Another chat template must raise tau by this share.
MIN_TAU_GAIN = 0.15
#: Agreements within ``CHANCE_MARGIN`` of a constant prediction's count as chance; below
#: ``LOW_AGREEMENT``, further training is recommended.
CHANCE_MARGIN, LOW_AGREEMENT = 0.1, 0.5
#: A draft vocabulary should cover this share of the answers.
MIN_COVERAGE = 0.9
#: Larger trees are recommended if more than this share of the steps accepts a longest path.
MAX_FULL_STEPS = 0.3
#: Drafts after drafts should be accepted this often, relative to drafts after the target's tokens.
MIN_DEEP_RATIO = 0.75
#: Agreement may fall by this much with the context length.
MAX_LENGTH_DROP = 0.15
#: Training text may be this much less likely than the target's own samples, in nats per token.
MAX_EXCESS = 0.2
#: Answers with a smaller share of distinct pairs of tokens are loops, which are easy to draft.
MIN_VARIETY = 0.4
#: Threshold to probe if the pair has none.
PROBED_THRESHOLD = 0.1
#: Minimum number of values in a comparison.
MIN_COUNT = 50


@dataclass(frozen=True)
class Finding:
    """The result of a check: a ``problem`` must be repaired, a ``note`` may explain a low tau."""

    check: str
    level: Literal["ok", "note", "problem"]
    evidence: str  # in numbers
    step: str | None = None  # recommended

    @classmethod
    def note(cls, condition: bool, check: str, evidence: str, step: str) -> Finding:
        """Return a note if a condition holds, and otherwise a finding without a step."""
        return cls(check, "note", evidence, step) if condition else cls(check, "ok", evidence)


def check_settings(measured: Measurements, agreement: Agreement) -> list[Finding]:
    """Check all settings in the order of repair and then, if they fit, the target.

    Except for damage, nothing is concluded from fewer than :data:`MIN_COUNT` answer tokens.
    """
    settings = find_settings(agreement.drafter, agreement.target)
    if agreement.own.isnan().any():
        return [_damage(agreement, settings[0].value)]
    if len(agreement.own) < MIN_COUNT:
        step = "decode more text: raise --max-new-tokens, or --count with --prompts"
        return [Finding("text", "note", f"only {len(agreement.own)} answer tokens", step)]
    compared = [_compare(agreement, setting) for setting in settings]
    # One wrong setting makes others look wrong: only the change that helps most is a problem.
    largest = max(gain for gain, _ in compared)
    found = [
        replace(finding, level="ok", step=None) if 0.0 < gain < largest else finding
        for gain, finding in compared
    ]
    found.append(check_template(measured))
    if all(finding.level != "problem" for finding in found):
        found.append(_target(agreement))
    return found


def _damage(agreement: Agreement, dtype: str) -> Finding:
    """Report distributions that are not finite, and the weights that are not."""
    drafter, share = agreement.drafter, float(agreement.own.isnan().double().mean())
    named = () if drafter.network is None else drafter.network.named_parameters()
    weights = {name: weight for name, weight in named if not weight.isfinite().all()}
    evidence = f"{dtype}; {share:.1%} of the draft's distributions are NaN or infinite"
    if weights:
        evidence += f", as are values of {', '.join(list(weights)[:3])}"
    step = "replace the drafter's files: its weights are damaged, or far too large"
    if drafter.dtype != torch.float32 and not any(item.isnan().any() for item in weights.values()):
        step = f"pass another --dtype, such as float32; if that does not help, {step}"
    return Finding("dtype", "problem", evidence, step)


def _compare(agreement: Agreement, setting: DrafterSetting) -> tuple[float, Finding]:
    """Return the gain in agreement if a setting is a problem, else 0.0, and the finding."""
    tried, own = {}, agreement.mean
    try:
        for name, changes in setting.alternatives:
            tried[name] = agreement.measure(*changes).nan_to_num(0.0)
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):  # of weights in float32
            raise
    evidence, coverage = setting.value, 1.0
    if setting.check == "vocabulary":
        if (ids := agreement.drafter.token_ids) is not None:
            coverage = fmean(torch.isin(agreement.truth, ids).tolist())
            evidence += f", {coverage:.1%} of the answers"
        if own < 1.0 - MIN_ESTIMATED_GAIN:
            guess = agreement.with_estimated_map()
            if guess.mean() > max(MIN_ESTIMATED, own + MIN_ESTIMATED_GAIN):
                tried["a map estimated from the answers"] = guess
    if tried:
        name, after = max(tried.items(), key=lambda item: float(item[1].mean()))
        share, gains = float(after.mean()), after - agreement.own
        gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
        evidence += f"; agreement {own:.1%}, {share:.1%} with {name}"
        clear = gain > max(setting.min_gain, MIN_ERRORS * error)
        if clear and share > agreement.chance + CHANCE_MARGIN:
            return gain, Finding(setting.check, "problem", evidence, setting.step.format(name))
    step = "use a head whose draft vocabulary covers such text"
    if isinstance(agreement.drafter, EagleHead):
        step += ", or a larger --draft-vocabulary"
    return 0.0, Finding.note(coverage < MIN_COVERAGE, setting.check, evidence, step)


def check_template(measured: Measurements) -> Finding:
    """Check whether another chat template raises tau."""
    tokenizer, own, chat = measured.model.tokenizer, measured.chat_template, measured.chats[0]
    own_ids = encode_prompt(chat, tokenizer, own)
    before = complete_steps(measured.short)
    evidence, best, step = f"tau {fmean(before):.2f}", [0], ""
    for name, template, selection in candidate_templates(tokenizer):
        try:
            ids = encode_prompt(chat, tokenizer, template)
        except ValueError:
            continue
        if ids.equal(own_ids):
            continue
        answers = measured.answer(template, measured.chats)
        after = complete_steps(answers)
        # Much shorter answers and loops are easier to draft.
        comparable = sum(after) > sum(before) / 2
        if comparable and _variety(answers) > MIN_VARIETY and fmean(after) > fmean(best):
            best, step = after, selection
            evidence = f"tau {fmean(before):.2f}, {fmean(after):.2f} with {name}"
    if unknown := unknown_markers(own, tokenizer):
        evidence += f"; {', '.join(unknown)} not in the target's vocabulary"
    error = math.hypot(
        *(
            stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
            for values in (before, best)
        )
    )
    if fmean(best) - fmean(before) > max(MIN_TAU_GAIN * fmean(before), MIN_ERRORS * error):
        return Finding("chat template", "problem", evidence, step)
    step = "try another --conv-template, or check the chat_template of the target's tokenizer"
    return Finding.note(bool(unknown), "chat template", evidence, step)


def _variety(answers: Sequence[MeasuredAnswer]) -> float:
    """Return the share of distinct pairs of tokens in an answer, averaged."""
    pairs = (list(pairwise(answer.ids[answer.start :].tolist())) for answer in answers)
    return fmean([len(set(found)) / len(found) for found in pairs if found] or [0.0])


def _target(agreement: Agreement) -> Finding:
    """Check whether the agreement is above chance, and not low."""
    share = agreement.mean
    evidence = f"agreement {share:.1%}, {agreement.chance:.1%} with a constant prediction"
    if share <= agreement.chance + CHANCE_MARGIN:
        step = (
            "train the drafter further, or use one that was trained for this target and tokenizer"
        )
        return Finding("target", "problem", evidence, step)
    step = "train the drafter on the target's own answers (heads: eagle-fsd train --regenerate)"
    return Finding.note(share < LOW_AGREEMENT, "target", evidence, step)


def check_length(measured: Measurements) -> Finding:
    """Check whether the agreement falls with the context length."""
    rows = [row for row in measured.by_length if row["tokens"] >= MIN_COUNT]
    if len(rows) < 2:
        evidence = f"fewer than two ranges of context lengths have {MIN_COUNT} answer tokens"
        return Finding("context length", "ok", evidence)
    ends = rows[0], rows[-1]
    evidence = "agreement " + ", ".join(
        f"{row['agreement']:.1%} at {row['first']}-{row['last']} tokens" for row in ends
    )
    first, last = (row["agreement"] for row in ends)
    variance = sum(row["agreement"] * (1.0 - row["agreement"]) / row["tokens"] for row in ends)
    falls = first - last > max(MAX_LENGTH_DROP, MIN_ERRORS * math.sqrt(variance))
    step = "train the drafter on longer chats (heads: eagle-fsd train --max-length)"
    return Finding.note(falls, "context length", evidence, step)


def check_depth(measured: Measurements) -> Finding:
    """Check whether tokens drafted deep in a chain are accepted less often than the first ones."""
    rows, deep = measured.by_depth, measured.by_depth[2:]
    total = sum(row["steps"] for row in deep)
    if total < MIN_COUNT:
        return Finding("depth", "ok", "few chains get beyond two tokens")
    first = rows[0]["accepted"]
    later = sum(row["steps"] * row["accepted"] for row in deep) / total
    evidence = f"accepted {first:.1%} at depth 1, {later:.1%} from depth 3 on"
    runs = 3 if isinstance(measured.model.drafter, EagleHead) else 7  # the default of EAGLE-3
    step = f"train the head on its own outputs: eagle-fsd train --unroll {runs}"
    return Finding.note(later < MIN_DEEP_RATIO * first, "depth", evidence, step)


def check_speed(measured: Measurements) -> list[Finding]:
    """Report if drafting costs more than it gains."""
    slow, count = sum(answer.slower_than_plain for answer in measured.short), len(measured.short)
    if 2 * slow <= count:
        return []
    evidence = f"plain decoding would be faster in {slow} of {count} answers"
    step = "use smaller trees (eagle-fsd tune)"
    if isinstance(measured.model.drafter, EagleHead):
        step = f"draft fewer tokens: --draft-vocabulary, after eagle-fsd train ranks, or {step}"
    return [Finding("speed", "note", evidence, step)]


def check_gate(measured: Measurements) -> list[Finding]:
    """Report if FSD can hardly accept more than lossless decoding.

    The threshold is the pair's, or :data:`PROBED_THRESHOLD` if it has none.
    """
    if measured.model.acceptance.rule != "fsd":
        return []
    threshold = measured.model.acceptance.threshold or PROBED_THRESHOLD
    message = describe_closed_gate(measured.divergences, threshold)
    step = "train the drafter further, or raise the threshold; until then, --threshold 0 is faster"
    return [] if message is None else [Finding("gate", "note", message, step)]


def check_tree(measured: Measurements) -> Finding:
    """Check whether the depth or the size of the trees limits tau."""
    depth, nodes = measured.model.tree.depth, measured.model.tree.total_tokens
    longest = min(depth + 1, nodes - 1)
    full = fmean([length == longest + 1 for length in complete_steps(measured.short)])
    evidence = f"{full:.0%} of the steps accept the longest path, {longest} tokens"
    step = f"try trees deeper than --depth {depth}"
    if longest < depth + 1:
        step = f"try trees larger than --total-tokens {nodes}"
    return Finding.note(full > MAX_FULL_STEPS, "tree", evidence, step)


@torch.no_grad()
def check_training_text(target: Target, texts: Sequence[tuple[Tensor, Tensor]]) -> Finding:
    """Check whether the answers of training text could be the target's own.

    If they were sampled from the target at temperature 1, their mean negative log-probability would
    be the mean entropy of the target's distributions. A text is ``[S]`` token ids and ``[S]`` bool,
    which of them the loss covers.
    """
    found: list[Tensor] = []
    for ids, mask in texts:
        ids, mask = (item[: target.stable_length].to(target.device) for item in (ids, mask))
        covered = mask[1:].nonzero()[:, 0]
        features = target.prefill(ids[None], 0, target.new_cache(1, len(ids)), (LAST,))[0]
        for positions in covered.split(CHUNK):
            log_probs = target.project(features[positions]).log_softmax(-1)
            tokens = ids[positions + 1]
            likely = log_probs.argmax(-1) == tokens
            own = log_probs.gather(-1, tokens[:, None])[:, 0]
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            found.append(torch.stack([likely.double(), -own.double() - entropy.double()]))
    values = torch.cat(found, 1)
    if not values.shape[1]:
        step = "pass --data whose answers begin earlier: only the start of each chat is read"
        return Finding("training text", "note", "no answer tokens", step)
    share, excess = values.mean(1).tolist()
    evidence = (
        f"{share:.1%} of {values.shape[1]:,} answer tokens are the target's most likely ones;"
        f" {excess:+.2f} nats per token compared with its own samples"
    )
    step = "train on the target's own answers: eagle-fsd train regenerate rewrites the chats"
    return Finding.note(excess > MAX_EXCESS, "training text", evidence, step)
