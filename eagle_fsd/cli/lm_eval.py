"""``eagle-fsd lm-eval``: run lm-evaluation-harness on a pair."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from eagle_fsd.cli.console import fail


def lm_eval(
    *arguments: Annotated[
        str,
        Parameter(
            name="ARGUMENTS",
            allow_leading_hyphen=True,
            help="Arguments of the harness's command line; none: print its help.",
        ),
    ],
) -> None:
    """Evaluate a pair on the tasks of lm-evaluation-harness, with the harness's command line.

    Example: eagle-fsd lm-eval --tasks gsm8k --limit 100 --batch_size 8 --model_args threshold=0.1

    --model_args: target (or pretrained), drafter, dtype, device, quantize, draft_vocabulary,
    chat_template, settings, method (fsd or ar); the draft tree's total_tokens, depth, tree_top_k;
    and every acceptance option, such as threshold, divergence, min_ratio. --gen_kwargs: do_sample,
    temperature, top_p, top_k, min_p, seed, until, max_gen_toks. The harness's commands ls and
    validate work, too.
    """
    try:
        from eagle_fsd.evaluation.lm_eval_model import run_harness
    except ImportError as error:
        if (error.name or "").startswith("eagle_fsd"):
            raise
        fail(f"lm-evaluation-harness is missing ({error}): pip install 'eagle_fsd[lm-eval]'", 1)
    run_harness(arguments)
