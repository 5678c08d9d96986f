"""What other engines can express: how they draft, their acceptance rules, and their settings.

:data:`ENGINES` has an entry for each engine. Calibration chooses among the settings that the engine
can apply, with our decoder. vLLM reads them from ``fsd.json``, with this project's plugin; for the
others, they are parameters of the engine's own rule, as flags or options. Nothing is certified for
the engine's own answers: ``eagle-fsd evaluate --server`` compares those.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle_fsd.bundled import BUNDLED_DRAFTERS, BUNDLED_TARGET
from eagle_fsd.engines.settings import CONFIG_KEY, check_supported
from eagle_fsd.evaluation.config import EngineName, EvaluationRequest
from eagle_fsd.evaluation.methods import EAGLE_ACCEPTANCE, Method, marker_token
from eagle_fsd.model.acceptance import TargetRule, TopKRule
from eagle_fsd.model.config import SETTINGS_FILE, AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.gguf import locate_model
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.options import OptionsError

#: SGLang's thresholds, the strictest first.
THRESHOLDS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1)
#: TensorRT-LLM's ``relaxed_topk`` and ``relaxed_delta``.
TOPS, GAPS = (2, 5, 10), (0.1, 0.2, 0.4, 0.6, 0.8)
#: Markers of TensorRT-LLM's thinking phase.
THINKING = ("<think>", "</think>")

#: Drafters that vLLM has, under its names for them.
VLLM_DRAFTERS = {
    EagleHead: "eagle",
    Eagle3Head: "eagle3",
    DraftModel: "draft_model",
    NGramDrafter: "ngram",
}


@dataclass(frozen=True)
class EngineSupport:
    """What another engine can express.

    Along chains, our decoder accepts the same tokens. In a tree, SGLang follows the first sibling
    that it accepts, and our decoder the longest of all accepted paths.
    """

    #: The engine's name in text.
    label: str
    #: Whether the engine drafts chains only, also for lossless decoding.
    chains_only: bool
    #: Selects from our settings, given the options that they share and the drafter, or returns the
    #: engine's own.
    methods: Callable[[Sequence[Method], AcceptanceConfig, str | None], Sequence[Method]]
    #: Formats a method, or exact decoding, with its tree.
    flags: Callable[[Method, TreeConfig, EagleFSD, EvaluationRequest], str]
    #: Whether the rule applies only when sampling, or only in greedy decoding, and the error
    #: otherwise.
    sampled: bool | None = None
    requirement: str = ""
    #: Whether the engine reads fsd.json.
    reads_settings: bool = False
    #: Raises an OptionsError where the engine cannot use the pair or its options.
    check: Callable[[EagleFSD, EvaluationRequest], object] = lambda *_: None


def _vllm_methods(
    ours: Sequence[Method], shared: AcceptanceConfig, drafter: str | None
) -> list[Method]:
    """Return the settings that the plugin supports; n-grams have no distribution to compare."""
    check_supported(shared)
    found = []
    for method in ours:
        acceptance = shared.overridden(method.acceptance)
        if drafter == "ngram" and acceptance.rule.split()[0] in ("fsd", "cascade"):
            continue
        with suppress(OptionsError):
            check_supported(acceptance)
            found.append(method)
    return found


def _check_vllm(model: EagleFSD, request: EvaluationRequest) -> None:
    if type(model.drafter) not in VLLM_DRAFTERS:
        raise OptionsError(f"vLLM has no drafter like {type(model.drafter).__name__}")
    for name in ("quantize", "draft_vocabulary"):
        if getattr(request, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise OptionsError(f"vLLM would load the models without {option}: calibrate without it")


def _vllm_flags(_: Method, tree: TreeConfig, model: EagleFSD, request: EvaluationRequest) -> str:
    """Return the commands that export the drafter, if necessary, and start the server."""
    kind, commands = VLLM_DRAFTERS[type(model.drafter)], []
    speculative: dict[str, Any] = {"method": kind, "num_speculative_tokens": tree.total_tokens - 1}
    if isinstance(model.drafter, NGramDrafter):
        speculative["prompt_lookup_max"] = model.drafter.max_match
        speculative["prompt_lookup_min"] = model.drafter.min_match
    else:
        name = request.drafter or "bundled"
        speculative["model"] = str(BUNDLED_DRAFTERS.get(name, name))
    folder = request.output_folder("calibrate").resolve()
    target = locate_model(request.target or str(BUNDLED_TARGET))
    if kind in ("eagle", "eagle3"):
        head, exported = speculative["model"], str(folder / "head")
        speculative["model"] = exported
        commands.append(
            f"eagle-fsd train export --format vllm --head {shlex.quote(head)} --target"
            f" {shlex.quote(target)} --out {shlex.quote(exported)}"
        )
    options = {
        "speculative-config": speculative,
        "additional-config": {CONFIG_KEY: str(folder / SETTINGS_FILE)},
    }
    flags = [f"--{name} {shlex.quote(json.dumps(value))}" for name, value in options.items()]
    flags.append(f"--dtype {str(model.target.dtype).removeprefix('torch.')}")
    commands.append(
        f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve {shlex.quote(target)} {' '.join(flags)}"
    )
    return "\n".join(commands)


def _sglang_methods(*_: object) -> list[Method]:
    rules = [(f"single {value:g}", TargetRule(single=value)) for value in THRESHOLDS]
    rules += [(f"acc {value:g}", TargetRule(acc=value)) for value in THRESHOLDS]
    return [Method(name, EAGLE_ACCEPTANCE, rule) for name, rule in rules]


def _sglang_flags(method: Method, tree: TreeConfig, *_: object) -> str:
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


def _tensorrt_methods(*_: object) -> list[Method]:
    return [
        Method(f"top {top} gap {gap:g}", EAGLE_ACCEPTANCE, TopKRule(top, gap), phase=THINKING)
        for top in TOPS
        for gap in GAPS
    ]


def _tensorrt_flags(method: Method, tree: TreeConfig, model: EagleFSD, _: object) -> str:
    """Return the ``speculative_config`` of a YAML file of options (``--extra_llm_api_options``)."""
    lines = ["speculative_config:", "  decoding_type: MTP", f"  max_draft_len: {tree.depth + 1}"]
    if isinstance(method.rule, TopKRule):
        begin, end = thinking_tokens(model.tokenizer)
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

    An OptionsError is raised if a marker is not a single token.
    """
    found = []
    for marker in THINKING:
        token = marker_token(tokenizer, marker)
        if str(tokenizer.decode([token])).strip() != marker:
            raise OptionsError(
                f"TensorRT-LLM relaxes its acceptance between {' and '.join(THINKING)} only, and"
                f" the target's tokenizer has no token {marker}"
            )
        found.append(token)
    return found


ENGINES: dict[EngineName, EngineSupport] = {
    "vllm": EngineSupport(
        label="vLLM",
        chains_only=True,
        methods=_vllm_methods,
        flags=_vllm_flags,
        reads_settings=True,
        check=_check_vllm,
    ),
    "sglang": EngineSupport(
        label="SGLang",
        chains_only=False,
        methods=_sglang_methods,
        flags=_sglang_flags,
        sampled=True,
        requirement="SGLang applies its thresholds to sampled requests only: set a --temperature"
        " above 0",
    ),
    "tensorrt-llm": EngineSupport(
        label="TensorRT-LLM",
        chains_only=True,
        methods=_tensorrt_methods,
        flags=_tensorrt_flags,
        sampled=False,
        requirement="TensorRT-LLM relaxes greedy decoding only: set --temperature to 0",
        check=lambda model, _: thinking_tokens(model.tokenizer),
    ),
}


def caveat(engine: EngineName) -> str:
    """Say what a calibration shows about an engine's own answers."""
    found = ENGINES[engine]
    rule = "" if found.reads_settings else f" with {found.label}'s rule"
    return (
        f"Answers and speeds are eagle-fsd's{rule}: {found.label} itself did not run, so the bound"
        " does not hold for its answers. Compare its servers with eagle-fsd evaluate --server"
        " before you rely on its answers."
    )


def flags(
    engine: EngineName,
    method: Method,
    tree: TreeConfig,
    model: EagleFSD,
    request: EvaluationRequest,
) -> str:
    """Return the settings in the form that the engine takes, a comment for plain decoding."""
    if tree.total_tokens == 1:
        return "# Plain decoding is the fastest: start the engine without speculative decoding."
    return ENGINES[engine].flags(method, tree, model, request)
