"""``eagle-fsd generate``: answer one prompt, streaming it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from eagle_fsd.cli.console import err, out
from eagle_fsd.cli.options import Device, Dtype, Head, Json, Target, load_pair, with_settings

ORIGIN_STYLES = {"exact": "green", "fuzzy": "bold yellow", "target": "default"}


@with_settings()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="What to say to the model; - reads standard input.")
    ],
    settings: dict[str, Any],
    target: Target = None,
    head: Head = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k likeliest; 0 is off.")] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Makes sampling repeatable.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without the draft head.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text; no chat template.")
    ] = False,
    show_origins: Annotated[
        bool, typer.Option("--show-origins", help="Colour exact, fuzzy and target tokens.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming it, and say how it was decoded."""
    import torch

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    if top_p == 0.0 or temperature == float("inf"):
        raise typer.BadParameter("--top-p must be above 0 and --temperature finite")
    model = load_pair(target, head, dtype, device, settings)
    tokenizer = model.tokenizer
    if raw or tokenizer.chat_template is None:
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
    printer = _Printer(tokenizer, show_origins, quiet=as_json)
    decoding = model.stream(
        ids.to(model.target.device),
        torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        method="ar" if plain else "fsd",
    )
    try:
        for chunk in decoding:
            printer(chunk)
    except KeyboardInterrupt:
        pass  # what was said so far stands, and so do its figures
    printer.end()
    answer = decoding.output()
    stats = answer.stats
    if as_json:
        new = answer.sequences[0, ids.shape[1] :].tolist()
        record = {"text": tokenizer.decode(new, skip_special_tokens=True), "tokens": new}
        record |= {"origins": answer.origins[0].tolist(), "stats": stats.as_dict()}
        record |= {"settings": model.settings.as_dict()}
        typer.echo(json.dumps(record))
        return
    counts = stats.as_dict()["origins"]
    legend = ", ".join(f"{counts[name]} {name}" for name in ORIGIN_STYLES)
    err.print(
        f"{stats.tokens} tokens ({legend}) in {stats.steps} target passes:"
        f" tau {stats.tau:.2f}, {stats.tokens_per_second:.1f} tokens/s,"
        f" threshold {0.0 if plain else model.settings.threshold:g}",
        style="dim",
        soft_wrap=True,
    )


class _Printer:
    """Writes tokens as they come, whole characters only."""

    def __init__(self, tokenizer: Any, show_origins: bool, quiet: bool) -> None:
        self.tokenizer, self.show_origins, self.quiet = tokenizer, show_origins, quiet
        self.tokens: list[int] = []
        self.shown = 0

    def __call__(self, chunk: Any) -> None:
        if self.quiet:
            return
        from eagle_fsd.model.verify import Origin

        for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
            self.tokens.append(token)
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith("\ufffd"):  # in the middle of a character
                continue
            self._show(text, ORIGIN_STYLES[Origin(origin).name.lower()])

    def _show(self, text: str, style: str = "") -> None:
        """Print what of ``text`` has not been."""
        from eagle_fsd.chat.text import harmless

        new = text[self.shown :]
        if out.is_terminal:
            new = harmless(new)
        out.print(Text(new, style=style if self.show_origins else ""), end="", soft_wrap=True)
        self.shown = len(text)

    def end(self) -> None:
        if self.quiet:
            return
        self._show(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        out.print()
        if self.show_origins:
            legend = [Text(name, style=style) for name, style in ORIGIN_STYLES.items()]
            err.print(Text(" ").join(legend))
