"""Acceptance rules that other engines offer, and their settings in the form that each one takes.

:data:`ENGINES` has an entry for each engine. Calibration tests an engine's :func:`series` as it
tests FSD's, with our decoder; :func:`settings` prints the chosen method for the engine, for whose
own answers nothing is certified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eagle_fsd.evaluation.config import EngineName
from eagle_fsd.evaluation.methods import EAGLE_ACCEPTANCE, Method
from eagle_fsd.model.acceptance import TargetRule, TopKRule
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.utils.options import OptionsError

#: SGLang's thresholds, in the order in which they accept more.
THRESHOLDS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1)
#: TensorRT-LLM's ``relaxed_topk`` and ``relaxed_delta``.
TOPS, GAPS = (2, 5, 10), (0.1, 0.2, 0.4, 0.6, 0.8)
#: Markers of TensorRT-LLM's thinking phase.
THINKING = ("<think>", "</think>")

#: Series of methods that accept more and more, by name.
Series = dict[str, list[Method]]


@dataclass(frozen=True)
class EngineRule:
    """The acceptance rule of another engine, and how to write its settings.

    Along chains, our decoder accepts the same tokens. In a tree, SGLang follows the first sibling
    that it accepts, and our decoder the longest of all accepted paths.
    """

    #: The engine's name in text.
    label: str
    #: Whether the rule applies when sampling or else in greedy decoding, and the error otherwise.
    sampled: bool
    requirement: str
    #: Whether the engine drafts chains only, also for lossless decoding.
    chains_only: bool
    series: Callable[[], Series]
    #: Formats a method of ``series``, or exact decoding, with its tree.
    flags: Callable[[Method, TreeConfig, PreTrainedTokenizerBase], str]
    #: Raises an OptionsError where the target's tokenizer makes the rule useless.
    check: Callable[[PreTrainedTokenizerBase], object] = lambda _: None


def _sglang_series() -> Series:
    rules = {
        "single": [TargetRule(single=value) for value in THRESHOLDS],
        "acc": [TargetRule(acc=value) for value in THRESHOLDS],
    }
    return {
        name: [
            Method(f"{name} {value:g}", EAGLE_ACCEPTANCE, rule)
            for value, rule in zip(THRESHOLDS, group, strict=True)
        ]
        for name, group in rules.items()
    }


def _sglang_flags(method: Method, tree: TreeConfig, _: PreTrainedTokenizerBase) -> str:
    """Return command-line flags of ``sglang.launch_server``."""
    thresholds = method.rule if isinstance(method.rule, TargetRule) else TargetRule()
    flags = {
        "num-steps": tree.depth + 1,  # SGLang counts the first level as a step
        "eagle-topk": tree.top_k,
        "num-draft-tokens": tree.total_tokens,
        "accept-threshold-single": f"{thresholds.single:g}",
        "accept-threshold-acc": f"{thresholds.acc:g}",
    }
    return " ".join(f"--speculative-{name} {value}" for name, value in flags.items())


def _tensorrt_series() -> Series:
    return {
        f"top {top}": [
            Method(f"top {top} gap {gap:g}", EAGLE_ACCEPTANCE, TopKRule(top, gap), phase=THINKING)
            for gap in GAPS
        ]
        for top in TOPS
    }


def _tensorrt_flags(method: Method, tree: TreeConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the ``speculative_config`` of a YAML file of options (``--extra_llm_api_options``)."""
    lines = ["speculative_config:", "  decoding_type: MTP", f"  max_draft_len: {tree.depth + 1}"]
    if isinstance(method.rule, TopKRule):
        begin, end = thinking_tokens(tokenizer)
        lines += [
            "  use_relaxed_acceptance_for_thinking: true",
            f"  relaxed_topk: {method.rule.top}",
            f"  relaxed_delta: {method.rule.gap:g}",
            # The defaults are DeepSeek-R1's.
            f"  begin_thinking_phase_token: {begin}",
            f"  end_thinking_phase_token: {end}",
        ]
    return "\n".join(lines)


def thinking_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens between which TensorRT-LLM relaxes its acceptance, at a line's beginning.

    An OptionsError is raised if a marker is not a single token, so that the rule never applies.
    """
    found = []
    for marker in THINKING:
        token = tokenizer.encode(f"\n{marker}", add_special_tokens=False)[-1]
        if str(tokenizer.decode([token])).strip() != marker:
            raise OptionsError(
                f"TensorRT-LLM relaxes its acceptance between {' and '.join(THINKING)} only, and"
                f" the target's tokenizer has no token {marker}"
            )
        found.append(token)
    return found


ENGINES: dict[EngineName, EngineRule] = {
    "sglang": EngineRule(
        label="SGLang",
        sampled=True,
        requirement="SGLang applies its thresholds to sampled requests only: set a --temperature"
        " above 0",
        chains_only=False,
        series=_sglang_series,
        flags=_sglang_flags,
    ),
    "tensorrt-llm": EngineRule(
        label="TensorRT-LLM",
        sampled=False,
        requirement="TensorRT-LLM relaxes greedy decoding only: set --temperature to 0",
        chains_only=True,
        series=_tensorrt_series,
        flags=_tensorrt_flags,
        check=thinking_tokens,
    ),
}


def caveat(engine: EngineName) -> str:
    """Return a sentence on what a calibration says about an engine's own answers."""
    name = ENGINES[engine].label
    return (
        f"Answers and speeds are eagle-fsd's with {name}'s rule: {name} itself did not run, so the"
        " bound does not hold for its answers. Evaluate them before you rely on them."
    )


def series(engine: EngineName, temperature: float) -> Series:
    """Return the settings of an engine's rule.

    An OptionsError is raised if the engine does not apply its rule at this temperature.
    """
    rule = ENGINES[engine]
    if rule.sampled != (temperature > 0.0):
        raise OptionsError(f"{rule.requirement}; got {temperature:g}")
    return rule.series()


def settings(
    engine: EngineName, method: Method, tree: TreeConfig, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the chosen settings in the form that the engine takes.

    ``tree`` is that with which the method was measured. For plain decoding, a tree of one node, the
    result is a comment that there is nothing to pass.
    """
    if tree.total_tokens == 1:
        return "# Plain decoding is the fastest: start the engine without speculative decoding."
    return ENGINES[engine].flags(method, tree, tokenizer)
