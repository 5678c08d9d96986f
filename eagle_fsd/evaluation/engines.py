"""Acceptance rules that other engines offer, and their settings in the form that each one takes.

Calibration tests an engine's :func:`series` as it tests FSD's, with our decoder; :func:`settings`
prints the chosen method for the engine, for whose own answers nothing is certified.

============  ==============================================  =====================================
engine        rule                                            applies
============  ==============================================  =====================================
SGLang        :class:`~eagle_fsd.model.acceptance.TargetRule`  when sampling; greedy requests ignore
                                                              the thresholds; as here along chains
TensorRT-LLM  :class:`~eagle_fsd.model.acceptance.TopKRule`   in greedy decoding, between
                                                              ``<think>`` and ``</think>``, along
                                                              chains
============  ==============================================  =====================================
"""

from __future__ import annotations

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
#: Engines whose rule is ours along chains only. In a tree, SGLang follows the first sibling that it
#: accepts; we follow the longest of all accepted paths.
CHAIN_RULES: tuple[EngineName, ...] = ("sglang", "tensorrt-llm")
#: Engines that draft chains only, also for lossless decoding.
CHAINS_ONLY: tuple[EngineName, ...] = ("tensorrt-llm",)


def caveat(engine: EngineName) -> str:
    """Return a sentence on what a calibration says about an engine's own answers.

    Args:
        engine: The engine.
    """
    name = {"sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}[engine]
    return (
        f"Answers and speeds are eagle-fsd's with {name}'s rule: {name} itself did not run, so the"
        " bound does not hold for its answers. Evaluate them before you rely on them."
    )


def series(engine: EngineName, temperature: float) -> dict[str, list[Method]]:
    """Return the settings of an engine's rule as series of methods that accept more and more.

    Args:
        engine: The engine.
        temperature: Temperature of the answers.

    Raises:
        OptionsError: The engine does not apply its rule at this temperature.
    """
    if engine == "sglang":
        if temperature == 0.0:
            raise OptionsError(
                "SGLang applies its thresholds to sampled requests only: set a --temperature above"
                " 0; got 0"
            )
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
    if temperature > 0.0:
        raise OptionsError(
            "TensorRT-LLM relaxes greedy decoding only: set --temperature to 0; got"
            f" {temperature:g}"
        )
    return {
        f"top {top}": [
            Method(f"top {top} gap {gap:g}", EAGLE_ACCEPTANCE, TopKRule(top, gap), phase=THINKING)
            for gap in GAPS
        ]
        for top in TOPS
    }


def thinking_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the tokens between which TensorRT-LLM relaxes its acceptance.

    Args:
        tokenizer: The target's tokenizer.

    Returns:
        The ids of the two markers of :data:`THINKING`, at the beginning of a line.

    Raises:
        OptionsError: A marker is not a single token, so that the engine's rule never applies.
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
    begin, end = found
    return begin, end


def settings(
    engine: EngineName, method: Method, tree: TreeConfig, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the chosen settings in the form that the engine takes.

    Args:
        engine: The engine.
        method: A method of :func:`series`, or exact decoding.
        tree: The draft tree that the method was measured with: a chain for engines of
            :data:`CHAINS_ONLY`.
        tokenizer: The target's tokenizer.

    Returns:
        Command-line flags of ``sglang.launch_server``, or the ``speculative_config`` of a YAML file
        of TensorRT-LLM's options (``--extra_llm_api_options``). For plain decoding, a tree of one
        node, a comment that there is nothing to pass.

    Raises:
        OptionsError: See :func:`thinking_tokens`.
    """
    if tree.total_tokens == 1:
        return "# Plain decoding is the fastest: start the engine without speculative decoding."
    if engine == "sglang":
        thresholds = method.rule if isinstance(method.rule, TargetRule) else TargetRule()
        flags = {
            # SGLang counts the first level as a step.
            "num-steps": tree.depth + 1,
            "eagle-topk": tree.top_k,
            "num-draft-tokens": tree.total_tokens,
            "accept-threshold-single": f"{thresholds.single:g}",
            "accept-threshold-acc": f"{thresholds.acc:g}",
        }
        return " ".join(f"--speculative-{name} {value}" for name, value in flags.items())
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
