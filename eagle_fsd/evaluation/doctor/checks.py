"""Look for causes of a low tau.

Every check returns a :class:`Finding`. Most compare the agreement of the drafter as it is with that
of the same drafter after one change: a change that raises it clearly names the cause.

Shape letters: ``T`` answer tokens of all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from eagle_fsd.evaluation.doctor.measurements import (
    CHUNK,
    Agreement,
    Answer,
    Measurements,
    complete_steps,
    mean,
)
from eagle_fsd.evaluation.doctor.templates import Candidate, candidate_templates, unknown_markers
from eagle_fsd.evaluation.doctor.variants import (
    describe_reads,
    describe_rope,
    in_float32,
    network_of,
    other_reads,
    other_ropes,
    replaced_rope,
    rope_parameters,
    rotary_embeddings,
    token_maps,
)
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.target import LAST, Target
from eagle_fsd.utils.progress import Progress

#: A change is clear if it raises the agreement by this share of the tokens and by this many
#: standard errors (of McNemar's test).
MIN_GAIN, MIN_ERRORS = 0.03, 4.0
#: Another chat template must raise tau by this factor and by this many standard errors.
MIN_TAU_FACTOR, MIN_TAU_ERRORS = 1.15, 3.0
#: Agreements up to this far above that of a constant prediction count as chance.
CHANCE_MARGIN = 0.1
#: A vocabulary map estimated from the answers must reach this agreement. Those of a drafter that
#: knows nothing but the previous token reach less.
MIN_ESTIMATED = 0.4
#: Agreements below this one need further training.
LOW_AGREEMENT = 0.5
#: A draft vocabulary should cover this share of the answers.
MIN_COVERAGE = 0.9
#: Deeper trees help if more than this share of the steps accepts a whole path.
MAX_FULL_STEPS = 0.3
#: Drafts after drafts should be accepted this often, relative to drafts after the target's tokens.
MIN_DEEP_RATIO = 0.75
#: Agreement may fall by this much with the context length.
MAX_LENGTH_DROP = 0.1
#: Training text may be this much less likely than the target's own samples, in nats per token.
MAX_EXCESS = 0.2
#: Answers with a smaller share of distinct pairs of tokens are loops, which are easy to draft.
MIN_VARIETY = 0.4
#: Values that a comparison of rows needs.
MIN_COUNT = 50

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: Name of the check.
        level: ``problem``: something does not fit and must be repaired. ``note``: explains a part
            of a low tau, and training or other settings may help. ``ok``: neither.
        evidence: What was found, in numbers.
        step: The recommended next step; None if there is nothing to do.
    """

    check: str
    level: Level
    evidence: str
    step: str | None = None


@dataclass(frozen=True)
class TrainingText:
    """A chat that a drafter was, or will be, trained on.

    Attributes:
        ids: Token ids.
        mask: For each token, whether the loss covers it.
    """

    ids: Sequence[int]
    mask: Sequence[bool]


def check_dtype(agreement: Agreement) -> Finding:
    """Check whether the drafter's data type costs agreement.

    Args:
        agreement: The drafter's predictions.
    """
    drafter, name = agreement.drafter, _name(agreement.drafter.dtype)
    setting = f"{name}; target {_name(agreement.target.dtype)}"
    if broken := mean((agreement.entries < 0).tolist()):
        return Finding(
            "dtype",
            "problem",
            f"{setting}; {broken:.1%} of the draft's distributions are NaN or infinite",
            "pass --dtype float32 or bfloat16; if that does not help, the drafter's weights are"
            " damaged",
        )
    changes = {}
    if drafter.dtype != torch.float32 and isinstance(drafter, DraftHead):
        with in_float32(drafter):
            changes["float32"] = agreement.measure()
    step = f"pass another --dtype: {name} is not precise enough for this drafter"
    return _compare("dtype", setting, agreement, changes, step)


def check_states(agreement: Agreement) -> Finding | None:
    """Check whether the drafter reads the hidden states that it was trained with.

    Args:
        agreement: The drafter's predictions.
    """
    drafter, layers = agreement.drafter, len(agreement.target.layers)
    if not drafter.reads:
        return None
    changes = {
        describe_reads(reads): agreement.measure(reads) for reads in other_reads(drafter, layers)
    }
    step = "correct the layer ids in the head's config.json, so that it reads {}"
    return _compare("hidden states", describe_reads(drafter.reads), agreement, changes, step)


def check_vocabulary(agreement: Agreement) -> Finding:
    """Check whether the draft's tokens are mapped to the target's, and cover the answers.

    Args:
        agreement: The drafter's predictions.
    """
    ids, setting, coverage = agreement.drafter.token_ids, "the target's", 1.0
    step = "use a drafter with the target's tokenizer: {} fits this one"
    changes: dict[str, Tensor] = {}
    if ids is not None:
        coverage = mean(torch.isin(agreement.truth, ids).tolist())
        setting = f"{len(ids):,} tokens, {coverage:.1%} of the answers"
        step = "export the head again with the d2t and t2d that it was trained with: {} fits"
        for name, other in token_maps(ids).items():
            changes[f"a map {name}"] = agreement.hits(agreement.entries, other)
    if mean(agreement.estimated.tolist()) > max(MIN_ESTIMATED, mean(agreement.own.tolist())):
        changes["a map estimated from the answers"] = agreement.estimated
    finding = _compare("vocabulary", setting, agreement, changes, step)
    if finding.level == "ok" and coverage < MIN_COVERAGE:
        step = "train a head with a larger draft vocabulary, counted on this kind of text"
        return Finding(finding.check, "note", finding.evidence, step)
    return finding


def check_rope(agreement: Agreement) -> Finding | None:
    """Check whether another RoPE fits the drafter better.

    Args:
        agreement: The drafter's predictions.
    """
    network = network_of(agreement.drafter)
    places = [] if network is None else rotary_embeddings(network)
    if not places:
        return None
    own = rope_parameters(places[0].module.config)
    theirs = rope_parameters(agreement.target.config)
    changes = {}
    for name, rope in other_ropes(own, theirs).items():
        with replaced_rope(places, rope):
            changes[name] = agreement.measure()
    setting = describe_rope(own)
    if theirs and describe_rope(theirs) != setting:
        setting += f"; target {describe_rope(theirs)}"
    step = "correct the RoPE in the drafter's config.json: {}"
    return _compare("RoPE", setting, agreement, changes, step)


def check_template(measured: Measurements) -> Finding:
    """Check whether another chat template raises tau.

    Args:
        measured: The measurements.
    """
    tokenizer, own = measured.model.tokenizer, measured.chat_template
    before = complete_steps(measured.short)
    best: tuple[float, Candidate] | None = None
    for candidate in candidate_templates(tokenizer):
        if _renders_alike(candidate, measured):
            continue
        answers = measured.answer(candidate.template)
        after = complete_steps(answers)
        if _comparable(measured.short, answers) and (best is None or mean(after) > best[0]):
            best = mean(after), candidate
            clear = _raises_tau(before, after)
    evidence = f"tau {mean(before):.2f}"
    if best is not None:
        evidence += f", {best[0]:.2f} with {best[1].name}"
    if unknown := unknown_markers(own, tokenizer):
        evidence += f"; {', '.join(unknown)} not in the target's vocabulary"
    if best is not None and clear:
        return Finding("chat template", "problem", evidence, best[1].step)
    if unknown:
        step = "check the chat_template of the target's tokenizer, or pass --conv-template"
        return Finding("chat template", "note", evidence, step)
    return Finding("chat template", "ok", evidence)


def check_target(agreement: Agreement) -> Finding:
    """Check whether the drafter knows the target.

    Args:
        agreement: The drafter's predictions.
    """
    share = mean(agreement.own.tolist())
    evidence = f"agreement {share:.1%}, of a constant prediction {agreement.chance:.1%}"
    own = getattr(agreement.drafter, "embed_tokens", None)
    if isinstance(own, nn.Embedding):
        theirs = agreement.target.embed.weight.float()
        difference = float((own.weight.to(theirs.device).float() - theirs).norm() / theirs.norm())
        evidence += f"; its embedding differs from the target's by {difference:.0%}"
    if share <= agreement.chance + CHANCE_MARGIN:
        step = (
            "use a drafter that was trained for this target: only the shapes of this one fit, or it"
            " is untrained"
        )
        return Finding("target", "problem", evidence, step)
    if share < LOW_AGREEMENT:
        step = "train the drafter further, on the target's own answers (--regenerate)"
        return Finding("target", "note", evidence, step)
    return Finding("target", "ok", evidence)


def check_settings(
    measured: Measurements, agreement: Agreement, progress: Progress
) -> list[Finding]:
    """Check all settings and, if they are right, the drafter itself.

    Args:
        measured: The measurements.
        agreement: The drafter's predictions.
        progress: Reports progress.

    Returns:
        The findings, in the order in which problems should be repaired.
    """
    findings: list[Finding] = []
    for done, check in enumerate((check_dtype, check_states, check_vocabulary, check_rope)):
        progress(done, 5)
        if (finding := check(agreement)) is not None:
            findings.append(finding)
    progress(4, 5)
    findings.append(check_template(measured))
    progress(5, 5)
    if all(finding.level != "problem" for finding in findings):
        findings.append(check_target(agreement))
    return findings


def check_length(measured: Measurements, agreement: Agreement) -> Finding:
    """Check whether the agreement falls with the context length.

    Args:
        measured: The measurements.
        agreement: The drafter's predictions.
    """
    hits = {
        f"{row.first}-{row.last} tokens": agreement.between(row.first, row.last).double()
        for row in measured.by_length
    }
    hits = {name: found for name, found in hits.items() if len(found) >= MIN_COUNT}
    if len(hits) < 2:
        return Finding("context length", "ok", "all contexts are of similar length")
    (short, first), *_, (long, last) = hits.items()
    drop = float(first.mean() - last.mean())
    evidence = f"agreement {float(first.mean()):.1%} at {short}, {float(last.mean()):.1%} at {long}"
    error = math.hypot(_standard_error(first), _standard_error(last))
    if drop > max(MAX_LENGTH_DROP, MIN_ERRORS * error):
        step = "train the drafter on longer chats (--max-length)"
        return Finding("context length", "note", evidence, step)
    return Finding("context length", "ok", evidence)


def check_depth(measured: Measurements) -> Finding:
    """Check whether drafts after drafts are accepted less often than drafts after the target's.

    Args:
        measured: The measurements.
    """
    rows = measured.by_depth
    deep = [row for row in rows[2:] if row.steps >= MIN_COUNT]
    if not deep:
        return Finding("depth", "ok", "few chains get beyond two tokens")
    steps = sum(row.steps for row in deep)
    later = sum(row.accepted * row.steps for row in deep) / steps
    evidence = f"accepted {rows[0].accepted:.1%} at depth 1, {later:.1%} from depth 3 on"
    head = isinstance(measured.model.drafter, DraftHead)
    if head and later < MIN_DEEP_RATIO * rows[0].accepted:
        step = "train the head on its own outputs: eagle-fsd train --unroll 3"
        return Finding("depth", "note", evidence, step)
    return Finding("depth", "ok", evidence)


def check_tree(measured: Measurements) -> Finding:
    """Check whether the depth of the trees limits tau.

    Args:
        measured: The measurements.
    """
    depth = measured.model.tree.depth
    full = mean([length == depth + 2 for length in complete_steps(measured.short)])
    evidence = f"{full:.0%} of the steps accept the longest path, {depth + 1} tokens"
    if full > MAX_FULL_STEPS:
        step = f"try trees deeper than --depth {depth}"
        return Finding("tree", "note", evidence, step)
    return Finding("tree", "ok", evidence)


@torch.no_grad()
def check_training_text(
    target: Target, texts: Sequence[TrainingText], progress: Progress
) -> Finding:
    """Check whether the answers of training text could be the target's own.

    If they were sampled from the target at temperature 1, their mean negative log-probability would
    be the mean entropy of the target's distributions.

    Args:
        target: The target.
        texts: The chats.
        progress: Reports progress.
    """
    found: list[Tensor] = []
    for done, text in enumerate(texts, 1):
        ids = torch.tensor(text.ids, device=target.device)
        covered = torch.tensor(text.mask, device=target.device)[1:].nonzero()[:, 0]
        features = target.prefill(ids[None], 0, target.new_cache(1, len(ids)), (LAST,))[0]
        for positions in covered.split(CHUNK):
            log_probs = target.project(features[positions]).log_softmax(-1)
            tokens = ids[positions + 1]
            likely = log_probs.argmax(-1) == tokens
            own = log_probs.gather(-1, tokens[:, None])[:, 0]
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            found.append(torch.stack([likely.double(), -own.double() - entropy.double()]))
        progress(done, len(texts))
    values = torch.cat(found, 1)
    if not values.shape[1]:
        step = "pass --data whose answers begin earlier: only the start of each chat is read"
        return Finding("training text", "note", "no answer tokens", step)
    share, excess = values.mean(1).tolist()
    evidence = (
        f"{share:.1%} of {values.shape[1]:,} answer tokens are the target's most likely ones;"
        f" {excess:+.2f} nats per token compared with its own samples"
    )
    if excess > MAX_EXCESS:
        step = "train on the target's own answers: eagle-fsd train regenerate rewrites the chats"
        return Finding("training text", "note", evidence, step)
    return Finding("training text", "ok", evidence)


def _compare(
    check: str, setting: str, agreement: Agreement, changes: Mapping[str, Tensor], step: str
) -> Finding:
    """Report a problem if one of several changes raises the agreement clearly.

    Args:
        check: Name of the check.
        setting: What the drafter uses.
        agreement: The drafter's predictions.
        changes: ``[T]`` bool, which answer tokens are predicted after each change.
        step: What to do, with ``{}`` in place of the change.
    """
    if not changes:
        return Finding(check, "ok", setting)
    name = max(changes, key=lambda change: int(changes[change].sum()))
    before, after = agreement.own, changes[name]
    shares = mean(before.tolist()), mean(after.tolist())
    evidence = f"{setting}; agreement {shares[0]:.1%}, {shares[1]:.1%} with {name}"
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    needed = max(MIN_GAIN * len(before), MIN_ERRORS * math.sqrt(gained + lost))
    if gained - lost <= needed or shares[1] <= agreement.chance + CHANCE_MARGIN:
        return Finding(check, "ok", evidence)
    return Finding(check, "problem", evidence, step.format(name))


def _renders_alike(candidate: Candidate, measured: Measurements) -> bool:
    """Whether a template formats a question like the one in use, or rejects it."""
    chat = [{"role": "user", "content": measured.questions[0]}]
    try:
        text = candidate.template.render(chat, add_generation_prompt=True)
    except ValueError:
        return True
    return text == measured.chat_template.render(chat, add_generation_prompt=True)


def _comparable(before: Sequence[Answer], after: Sequence[Answer]) -> bool:
    """Whether answers are neither much shorter nor loops, which are easy to draft."""
    return _length(after) > _length(before) / 2 and _variety(after) > MIN_VARIETY


def _length(answers: Sequence[Answer]) -> int:
    return sum(len(answer.ids) - answer.start for answer in answers)


def _variety(answers: Sequence[Answer]) -> float:
    """Return the share of distinct pairs of tokens in an answer, averaged."""
    shares = []
    for answer in answers:
        tokens = answer.ids[answer.start :].tolist()
        pairs = list(pairwise(tokens))
        if pairs:
            shares.append(len(set(pairs)) / len(pairs))
    return mean(shares)


def _raises_tau(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether accepted lengths rise clearly."""
    error = math.hypot(*(_standard_error(torch.tensor(item).double()) for item in (before, after)))
    gain = mean(after) - mean(before)
    return gain > max((MIN_TAU_FACTOR - 1) * mean(before), MIN_TAU_ERRORS * error)


def _standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
