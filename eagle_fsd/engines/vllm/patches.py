"""Connect the rejection sampler to vLLM, and refuse what would not work as intended.

vLLM loads plugins before it reads its configuration, so its classes are extended in place: a
configuration with settings is checked when it is made, in the first process; a worker extends its
model runner, whose rejection sampler takes the rule when it is made (Model Runner V1) or when the
model has been loaded (V2). What another version of vLLM may lack is imported only where it is used:
with such a version, settings are refused, and without settings nothing changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig

from eagle_fsd.engines.settings import (
    check_version,
    check_weights,
    describe,
    find_settings,
    reads_draft,
    rule_of,
)
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.utils.options import OptionsError

#: Pattern of the vLLM versions that this plugin was written for and tested with.
VERSION = "0.32.*"
log = logging.getLogger("vllm.eagle_fsd")


def install() -> None:
    """Extend vLLM's configuration, rejection sampler and workers, once per process."""
    if getattr(VllmConfig, "_eagle_fsd", False):
        return
    VllmConfig._eagle_fsd = True
    _after(VllmConfig, "__post_init__", _check)
    try:
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError:
        return  # another version, for which check_config refuses settings
    _after(RejectionSampler, "__init__", relax)
    _after(WorkerBase, "__init__", extend_worker)


def _after(cls: type, name: str, function: Callable[[Any], None]) -> None:
    """Call a function with the instance after a method of a class."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        function(self)

    setattr(cls, name, wrapped)


def _check(config: VllmConfig) -> None:
    """Refuse a configuration in one line: pydantic would wrap a ``ValueError`` in several."""
    try:
        check_config(config)
    except OptionsError as error:
        raise RuntimeError(str(error)) from None


def check_config(config: VllmConfig) -> None:
    """Refuse a configuration whose settings would be ignored or applied to other models.

    Raises ``OptionsError``, which ends vLLM's start.
    """
    settings = find_settings(config.additional_config)
    if settings is None or config.model_config is None:
        return
    if settings.lossless:
        log.info("eagle_fsd: the settings are lossless; vLLM is unchanged")
        return
    check_version("vLLM", vllm_version, VERSION)
    speculative = config.speculative_config
    if speculative is None:
        raise OptionsError("settings for eagle_fsd need a --speculative-config: nothing is drafted")
    if speculative.rejection_sample_method != "standard":
        raise OptionsError(
            "settings for eagle_fsd need rejection_sample_method standard; got"
            f" {speculative.rejection_sample_method}"
        )
    if config.model_config.logprobs_mode.startswith("processed"):
        raise OptionsError(
            "log-probabilities after vLLM's processors would show eagle_fsd's rule: use"
            f" --logprobs-mode raw_logprobs or raw_logits; got {config.model_config.logprobs_mode}"
        )
    rule = rule_for(settings)
    if reads_draft(rule) and speculative.method not in ("eagle", "eagle3", "draft_model"):
        raise OptionsError(
            "a rule that compares distributions needs an EAGLE head or a draft model; got the"
            f" method {speculative.method}"
        )
    for option in ("use_local_argmax_reduction", "parallel_drafting", "use_heterogeneous_vocab"):
        if reads_draft(rule) and getattr(speculative, option):
            raise OptionsError(f"a rule that compares distributions does not support {option}")
    if config.use_v2_model_runner:
        _check_v2(config, rule)
    # vLLM also checks the configuration of a draft model, whose model_config is the draft's.
    target = speculative.target_model_config or config.model_config
    folders = {"target": target.model, "drafter": str(speculative.model)}
    check_weights(settings, folders, log)
    log.info("%s", describe(settings, "vLLM"))


def _check_v2(config: VllmConfig, rule: AcceptanceRule) -> None:
    """Refuse what makes Model Runner V2 show changed distributions or drop the draft's."""
    for name, value in (
        ("enable_adaptive_verification", config.speculative_config.enable_adaptive_verification),
        ("return_sampling_mask", config.model_config.return_sampling_mask),
        ("watermark_config", config.watermark_config),
        ("enable_batch_sharded_sampling", config.parallel_config.enable_batch_sharded_sampling),
    ):
        if value:
            raise OptionsError(f"eagle_fsd does not support {name}")
    if reads_draft(rule) and config.speculative_config.draft_sample_method != "probabilistic":
        raise OptionsError(
            "a rule that compares distributions needs draft_sample_method probabilistic in Model"
            " Runner V2, which drops the draft's distributions otherwise"
        )


def relax(sampler: Any) -> None:
    """Give the rejection sampler of Model Runner V1 the rule of its configuration, if any."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    rule = rule_of(None if config is None else config.additional_config)
    if rule is not None:
        from eagle_fsd.engines.vllm.sampler import RelaxedSampler

        RelaxedSampler.convert(sampler, rule)


def extend_worker(worker: Any) -> None:
    """Extend the model runner that a worker is about to make, if its configuration has a rule."""
    config = worker.vllm_config
    if rule_of(config.additional_config) is None:
        return
    if config.use_v2_model_runner:  # its modules are imported only where they are used
        from eagle_fsd.engines.vllm.sampler_v2 import extend_runner_v2

        extend_runner_v2()
    else:
        from eagle_fsd.engines.vllm.runner import extend_runner

        extend_runner()
