"""``eagle-fsd generate``: answer one prompt."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from pydantic import Field

from eagle_fsd.cli.console import err, out, print_json, print_text
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Json,
    Pair,
    PairArguments,
    ShowOrigins,
    TreeOptions,
    load_pair,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import joined, read_prompt
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig, settings_dict
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.text import before_stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from eagle_fsd.model.generation import Generation
    from eagle_fsd.model.pipeline import EagleFSD
    from eagle_fsd.model.stats import DecodeStats


#: Minimum number of steps of an answer that shows whether drafting pays.
MIN_STEPS = 16
#: Tokens that are decoded to see whether the divergences are above the threshold.
PROBED_TOKENS = 64


class EncodedPrompt(NamedTuple):
    """A prompt's tokens, ``[1, S]``, and what ends its answer.

    ``ends`` are arguments of ``generate``; the text ends before one of the strings ``stop``.
    """

    ids: Tensor
    ends: dict[str, Any]
    stop: Sequence[str]

    def arguments(self, config: GenerateConfig, **changes: Any) -> dict[str, Any]:
        """Return the arguments of ``generate``, some of them changed."""
        return {
            "input_ids": self.ids,
            "attention_mask": self.ids.new_ones(self.ids.shape),
            "max_new_tokens": config.max_new_tokens,
            "sampling": config.sampling(),
            **self.ends,
            **changes,
        }


class GenerateConfig(SamplingConfig):
    """Sampling and length of the answer."""

    max_new_tokens: int = Field(256, ge=1, description="Maximum number of new tokens.")
    num_beams: int = Field(
        1, ge=1, le=256, description="Beams of a beam search; 1 for greedy decoding or sampling."
    )


def generate(
    prompt: Annotated[
        str, Parameter(help="The user's message; - reads it from standard input.")
    ] = "",
    /,
    *,
    stdin: Annotated[bool, Parameter(name="-", show=False)] = False,
    plain: Annotated[bool, Parameter(help="Decode without the drafter.")] = False,
    raw: Annotated[bool, Parameter(help="Continue the prompt; apply no chat template.")] = False,
    show_origins: ShowOrigins = False,
    speedup: Annotated[
        bool, Parameter(help="Decode once more without the drafter, and print the speed-up.")
    ] = False,
    as_json: Json = False,
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    config: Annotated[GenerateConfig, options("Sampling")] = GenerateConfig(),
) -> None:
    """Answer one prompt, and print how the answer was decoded."""
    if config.num_beams > 1 and (config.temperature or show_origins or acceptance.model_fields_set):
        raise OptionsError(
            "--num-beams is exact and deterministic: leave out --temperature, --show-origins and"
            " acceptance options"
        )
    if speedup and (plain or as_json or config.num_beams > 1):
        raise OptionsError("--speedup excludes --plain, --json and --num-beams")
    drafts = pair.settings or pair.draft_vocabulary or tree.model_fields_set
    if plain and (drafts or acceptance.model_fields_set):
        raise OptionsError(
            "--plain excludes --settings, tree options, acceptance options and --draft-vocabulary"
        )
    if stdin and prompt:
        raise OptionsError("PROMPT and - exclude each other")
    with joined(pair.device) as is_first:
        text = read_prompt(is_first) if stdin else prompt
        if not text.strip():
            raise OptionsError("PROMPT is missing or empty")
        model = load_pair(pair, tree, acceptance, plain)
        if not plain:
            from eagle_fsd.model.default_tree import fit_tree

            fit_tree(model)
        encoded = _encode(text, model, pair.chat_template, raw)
        method = "ar" if plain else "fsd"
        if config.num_beams > 1:
            _print_best(model, encoded, config, method=method, as_json=as_json)
        else:
            if speedup:
                _warm_up(model, encoded, config)
            stats = _print_stream(
                model, encoded, config, method=method, colored=show_origins, as_json=as_json
            )
            # Compiled steps are not judged: their times may include the compilation.
            slower = stats.slower_than_plain and not pair.compile
            if speedup and stats.tokens:
                slower = _print_speedup(model, encoded, config, stats) < 1.0
                _print_closed_gate(model, encoded.ids, config)
            drafted = model.tree_for(model.acceptance).total_tokens > 1
            if slower and drafted and stats.steps >= MIN_STEPS and not as_json:
                _print_advice(stats)


def _print_stream(
    model: EagleFSD,
    encoded: EncodedPrompt,
    config: GenerateConfig,
    method: str,
    colored: bool,
    as_json: bool,
) -> DecodeStats:
    """Print the answer as it is decoded, or all of it as JSON; return its statistics."""
    generation = model.stream(**encoded.arguments(config, method=method))
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt):  # until the answer so far is printed
        if as_json:
            generation.finish()
        else:
            _print_answer(generation, model.tokenizer, encoded.stop, colored)
        interrupted = False
    answer = generation.output()
    stats = answer.stats
    if as_json:
        from eagle_fsd.utils.detokenization import answer_text

        tokens = answer.sequences[0, encoded.ids.shape[1] :].tolist()
        text = answer_text(model.tokenizer, tokens)
        tree = model.tree_for(model.acceptance)
        print_json(
            {
                "text": before_stop(text, encoded.stop),
                "tokens": tokens,
                "origins": answer.origins[0].tolist(),
                "stats": stats.as_dict(),
                "settings": {} if method == "ar" else settings_dict(tree, model.acceptance),
            }
        )
    else:
        origins = stats.as_dict()["origins"]
        counts = ", ".join(f"{count} {origin}" for origin, count in origins.items())
        err.print(
            f"tokens: {stats.tokens} ({counts}); target passes: {stats.steps};"
            f" tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s,"
            f" {'threshold 0' if method == 'ar' else model.acceptance.label}",
            style="dim",
        )
    if interrupted:
        raise KeyboardInterrupt
    return stats


def _warm_up(model: EagleFSD, encoded: EncodedPrompt, config: GenerateConfig) -> None:
    """Compile or capture steps, which is not part of the speeds to compare."""
    from eagle_fsd.evaluation.methods import fresh_pair
    from eagle_fsd.model.compilation import has_graphs

    pair, new = fresh_pair(model), config.max_new_tokens
    if not (model.capture and model.target.one_device and has_graphs(model.target.device)):
        new = min(MIN_STEPS, new)  # with graphs, longer caches would be captured again
    for method in ("fsd", "ar"):
        pair.generate(**encoded.arguments(config, max_new_tokens=new, method=method))


def _print_speedup(
    model: EagleFSD, encoded: EncodedPrompt, config: GenerateConfig, stats: DecodeStats
) -> float:
    """Decode at most as many tokens without the drafter; print and return the speeds' ratio."""
    arguments = encoded.arguments(config, max_new_tokens=stats.tokens, method="ar")
    plain = model.generate(**arguments).stats.tokens_per_second
    ratio = stats.tokens_per_second / plain
    err.print(f"{ratio:.2f} times as fast as plain decoding ({plain:.1f} tokens/s)", style="dim")
    return ratio


def _print_advice(stats: DecodeStats) -> None:
    """Say why speculation was slower than plain decoding, and what helps."""
    draft, target = stats.seconds["draft"], stats.seconds["target"]
    timed = f": drafting took {draft:.1f} s, the target's passes {target:.1f} s" if target else ""
    err.print(
        f"Plain decoding (--plain) would be faster{timed}. Try smaller trees (eagle-fsd tune), or"
        " see what eagle-fsd doctor recommends."
    )


def _print_closed_gate(model: EagleFSD, ids: Tensor, config: GenerateConfig) -> None:
    """Say if FSD hardly differs from lossless decoding, because the drafter is too far off."""
    from eagle_fsd.model.probe import describe_closed_gate, gate_divergences

    acceptance = model.acceptance
    if acceptance.rule != "fsd" or acceptance.lossless:
        return
    if acceptance.divergence_on == "warped" and config.temperature:
        return  # greedy decoding, which is probed, warps nothing
    count = min(PROBED_TOKENS, config.max_new_tokens)
    found = gate_divergences(model, [ids[0]], count, acceptance.divergence)
    message = describe_closed_gate(found, acceptance.threshold)
    if message is not None:
        err.print(f"{message}. Use or train a better drafter, or raise the threshold.")


def _print_best(
    model: EagleFSD, encoded: EncodedPrompt, config: GenerateConfig, method: str, as_json: bool
) -> None:
    """Print the best hypothesis of a beam search; as JSON, all of them."""
    from eagle_fsd.utils.detokenization import answer_text

    ids, beams = encoded.ids, config.num_beams
    found = model.beam_search(
        ids,
        ids.new_ones(ids.shape),
        max_new_tokens=config.max_new_tokens,
        num_beams=beams,
        num_return_sequences=beams,
        eos_token_id=encoded.ends.get("eos_token_id"),
        method=method,
    )
    new = found.sequences[:, ids.shape[1] :].tolist()
    texts = [before_stop(answer_text(model.tokenizer, row), encoded.stop) for row in new]
    if as_json:
        print_json(
            {
                "hypotheses": [
                    {"text": text, "score": score}
                    for text, score in zip(texts, found.scores.tolist(), strict=True)
                ],
                "stats": found.stats.as_dict(),
                "tree": {} if method == "ar" else model.exact_tree.model_dump(),
            }
        )
        return
    print_text(texts[0])
    out.print()
    err.print(
        f"score {float(found.scores[0]):.4f} with {beams} beams;"
        f" {found.stats.tokens} steps in {found.stats.steps} target passes:"
        f" tau {found.stats.tau:.2f}, {found.stats.tokens_per_second:.1f} steps/s",
        style="dim",
    )


def _encode(text: str, model: EagleFSD, chat_template: str | None, raw: bool) -> EncodedPrompt:
    """Tokenize a prompt, as a chat unless ``raw`` is set or there is no chat template."""
    from eagle_fsd.evaluation.completion import answer_ends
    from eagle_fsd.utils.chat_templates import encode_prompt, load_chat_template

    tokenizer, device = model.tokenizer, model.target.device
    if raw or (chat_template is None and tokenizer.chat_template is None):
        return EncodedPrompt(tokenizer(text, return_tensors="pt").input_ids.to(device), {}, ())
    template = load_chat_template(tokenizer, chat_template)
    ids = encode_prompt([{"role": "user", "content": text}], tokenizer, template)
    return EncodedPrompt(ids.to(device), answer_ends(model, template), template.stop)


def _print_answer(
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    stop: Sequence[str],
    show_origins: bool,
) -> None:
    """Print tokens as they are decoded, colored by origin on request."""
    from eagle_fsd.chat.text import TextStream
    from eagle_fsd.utils.terminal import ORIGIN_STYLES, origin_legend

    stream = TextStream(tokenizer, stop)
    try:
        for chunk in generation:
            pieces = stream.push(chunk.tokens, chunk.origins)
            if chunk.finished:
                pieces += stream.flush()
            for piece in pieces:
                style = ORIGIN_STYLES[piece.origin.name.lower()] if show_origins else ""
                print_text(piece.text, style)
    finally:
        for piece in stream.flush():  # held back when the answer was interrupted
            print_text(piece.text)
        out.print()
        if show_origins:
            err.print(origin_legend())
