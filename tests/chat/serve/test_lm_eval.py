"""EleutherAI's lm-evaluation-harness scores and generates text through the API."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_servers import COMPLETIONS, NAME, APIThread
from harness import check_results, requires_harness, run_harness

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_TARGET


@pytest.mark.slow
@requires_harness
def test_log_likelihoods_and_answers_are_the_targets(
    server: APIThread, model: EagleFSD, tmp_path: Path
) -> None:
    options = {
        "model": NAME,
        "base_url": server.url + COMPLETIONS,
        "tokenizer_backend": "huggingface",
        "tokenizer": BUNDLED_TARGET,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    program = ["-m", "lm_eval", "--model", "local-completions"]
    program += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    samples, _ = run_harness(program, tmp_path, model, ["--batch_size", "3"])
    check_results(samples, model)
