"""The model ``eagle-fsd`` of lm-evaluation-harness; importing this module registers it.

The harness (https://github.com/EleutherAI/lm-evaluation-harness) discovers no entry points of other
packages, so :func:`run_harness` calls its command line after the registration.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm import tqdm

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.evaluation.answering import answer_seed
from eagle_fsd.evaluation.processes import load_models
from eagle_fsd.model.config import (
    AcceptanceConfig,
    PairOptions,
    SamplingConfig,
    Settings,
    TreeConfig,
    settings_dict,
)
from eagle_fsd.model.request import Prompt
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.utils.chat_templates import FastChatTemplate
from eagle_fsd.utils.detokenization import answer_text, special_tokens
from eagle_fsd.utils.options import OptionsError

#: Name of the model in the harness.
NAME = "eagle-fsd"
#: The tree's ``top_k`` in model arguments; ``top_k`` alone is an option of sampling.
TREE_TOP_K = "tree_top_k"
#: Statistics of all answers in the harness's results.
STATISTICS = ("tokens", "steps", "tau", "tokens_per_second", "origins", "seconds")
#: The device that the harness passes unless ``--device`` is given, also where there is no GPU.
HARNESS_DEVICE = "cuda:0"
#: Model arguments of the harness's ``hf`` that apply to a loaded model.
HARNESS_OPTIONS = (
    *("add_bos_token", "prefix_token_id", "truncation", "logits_cache", "softmax_dtype"),
    *("think_end_token", "enable_thinking", "chat_template_args"),
)

log = logging.getLogger(f"lm_eval.models.{NAME}")  # the harness prints messages of its loggers


@register_model(NAME)
class EagleFSDModel(HFLM):  # type: ignore[misc]
    """A target and a drafter as a model of lm-evaluation-harness.

    Answers are decoded with draft trees. Log-likelihoods are computed by the harness's model
    ``hf``, from which this class inherits. The options are the fields of :class:`PairOptions`, of
    :class:`TreeConfig` (with ``tree_top_k`` for its ``top_k``) and of :class:`AcceptanceConfig`,
    and :data:`HARNESS_OPTIONS`. ``pretrained`` is another name of ``target``; the harness names its
    results folder after it. ``method`` is ``fsd`` or ``ar``, and ``settings`` an ``fsd.json`` file.
    ``batch_size`` prompts are decoded at once; ``auto`` stands for ``max_batch_size``.
    ``max_length`` is by default the target's context length.
    """

    def __init__(
        self,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        method: str = "fsd",
        settings: str | None = None,
        pretrained: str | None = None,
        **options: Any,
    ) -> None:
        harness = _take(options, HARNESS_OPTIONS)
        tree = _take(options, TreeConfig.model_fields.keys() - {"top_k"})
        if TREE_TOP_K in options:
            tree["top_k"] = options.pop(TREE_TOP_K)
        acceptance = _take(options, AcceptanceConfig.model_fields)
        if options.get("device") == HARNESS_DEVICE:  # None is the first GPU, or else the CPU
            del options["device"]
        if pretrained is not None and options.setdefault("target", pretrained) != pretrained:
            raise OptionsError("pretrained is another name of target: pass only one of them")
        loaded = PairOptions.from_dict(options)
        if loaded.compile == "auto":
            raise OptionsError(
                "evaluations must not depend on timing: compile=auto is not supported"
            )
        self.pair = load_models(loaded, settings=settings)
        # Batches are fitted to the memory anyway, so "auto" needs no search.
        self._rows = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        self.pair.compile = bool(loaded.compile)
        self.pair.configure(Settings.from_dict({**tree, **acceptance}))
        self.method, self.stats = method, DecodeStats.empty(0)
        name = self._template_name = loaded.chat_template
        self._template = None if name is None else FastChatTemplate(name)
        super().__init__(
            self.pair.model,
            tokenizer=self.pair.tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length or self.pair.target.context_length,
            **harness,
        )
        self.pretrained = loaded.target or str(BUNDLED_TARGET)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to its first stop string.

        Generation arguments are ``until``, ``max_gen_toks``, ``do_sample``, fields of
        :class:`SamplingConfig`, and ``fsd``, a dictionary of acceptance options.
        """
        found = [self._prompt(index, *request.args) for index, request in enumerate(requests)]
        answers = [""] * len(requests)
        disabled = disable_tqdm or self.rank != 0
        begin = time.perf_counter()
        with tqdm(total=len(requests), disable=disabled, desc="Answering") as bar:
            prompts = (prompt for prompt, _ in found)
            for item in self.pair.generate_many(prompts, max_batch=self._rows, method=self.method):
                request, (_, stop) = requests[item.index], found[item.index]
                answers[item.index] = self._text(item.tokens, stop)
                self.cache_hook.add_partial("generate_until", request.args, answers[item.index])
                self.stats.accepted += item.stats.accepted
                self.stats.origins += item.stats.origins
                bar.update()
        seconds = self.stats.seconds.get("generate", 0.0) + time.perf_counter() - begin
        self.stats.seconds["generate"] = seconds
        stats = self.stats
        log.info(
            "%d tokens, tau %.2f, %.1f tokens/s", stats.tokens, stats.tau, stats.tokens_per_second
        )
        return answers

    def _prompt(
        self, index: int, context: str, arguments: dict[str, Any]
    ) -> tuple[Prompt, list[str]]:
        """Return a prompt with its options, and the strings before which its answer is cut.

        ``index`` is that of the request: repeated requests with one seed are different samples.
        """
        pair, template = self.pair, self._template
        options = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        limit, stop = int(options.pop("max_gen_toks")), set(options.pop("until", []))
        if limit >= self.max_length:
            raise OptionsError(
                f"max_gen_toks must be less than max_length, {self.max_length}; got {limit}"
            )
        eos = [*pair.eos_token_ids, self.eot_token_id]
        if template is not None:
            eos += template.stop_token_ids
            stop |= set(template.stop)
        special = special_tokens(self.tokenizer, stop)
        eos += special.values()
        strings = sorted(stop - special.keys() - {""})
        acceptance = pair.acceptance.updated(**options.pop("fsd", {}))
        stable = pair.target.stable_length
        room = max(1, min(self.max_length - limit, stable - 1))
        (ids,), _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=self.truncation
        )
        sampling = _sampling(options)
        if sampling.seed is not None:
            sampling = sampling.updated(seed=answer_seed(sampling.seed, index, 0, 0))
        criteria = stop_sequences_criteria(pair.tokenizer, strings, len(ids), batch_size=1)
        prompt = Prompt(
            ids,
            max_new_tokens=min(limit, stable - len(ids)),
            sampling=sampling,
            acceptance=acceptance,
            eos_token_id=eos,
            stopping_criteria=criteria,
        )
        return prompt, strings

    def _text(self, tokens: list[int], stop: list[str]) -> str:
        """Return the text of an answer, without its reasoning and what follows a stop string."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = answer_text(self.tokenizer, tokens)
        if isinstance(end, int):
            text = text.lstrip()
        marker = end if isinstance(end, str) else None
        cut: str = postprocess_generated_text(text, stop, marker)
        return cut

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, which the harness writes to its results."""
        if self._template is None:
            template: str | None = super().chat_template(chat_template)
            return template
        return f"FastChat's {self._template_name}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a chat; without a generation prompt, the target continues the last message."""
        if self._template is None:
            text: str = super().apply_chat_template(chat_history, add_generation_prompt)
            return text
        text = self._template.render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        return text[: text.rindex(last) + len(last)]

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes to its results: settings, and statistics of answers."""
        stats = {name: value for name, value in self.stats.as_dict().items() if name in STATISTICS}
        settings = settings_dict(self.pair.tree, self.pair.acceptance)
        own = {"method": self.method, "settings": settings, "stats": stats}
        return {**super().get_model_info(), "eagle_fsd": own}


def run_harness(arguments: Sequence[str]) -> None:
    """Run the harness's command line, with ``--model eagle-fsd`` where the command takes it."""
    logging.getLogger("lm_eval.models.huggingface").addFilter(_is_relevant)
    words = list(arguments)
    if words[:1] == ["run"]:
        del words[0]
    if words and words[0] not in ("ls", "validate"):
        words = ["run", "--model", NAME, *words]
    before, sys.argv = sys.argv, ["lm-eval", *(words or ["run"])]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether a message of ``hf`` is not about models that are passed as objects."""
    return "retrained`" not in record.getMessage()


def _take(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove some options from a dictionary, and return them."""
    return {name: options.pop(name) for name in names if name in options}


def _sampling(arguments: dict[str, Any]) -> SamplingConfig:
    """Convert Hugging Face's generation arguments."""
    values = dict(arguments)
    if (beams := values.pop("num_beams", 1)) != 1:
        raise OptionsError(
            f"num_beams must be 1; got {beams} (pass --gen_kwargs num_beams=1 to sample or decode"
            " greedily)"
        )
    sampled = values.pop("do_sample", False)
    temperature = values.pop("temperature", 1.0)
    return SamplingConfig.from_dict({**values, "temperature": temperature if sampled else 0.0})
