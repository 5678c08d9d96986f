"""EleutherAI's lm-evaluation-harness scores and generates text through the API."""

from __future__ import annotations

import sys

import pytest
from api_servers import COMPLETIONS, NAME, APIThread
from harness import (
    Samples,
    check_answers,
    check_choices,
    check_perplexity,
    requires_harness,
    run_harness,
)

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_TARGET

pytestmark = [pytest.mark.slow, requires_harness]


@pytest.fixture(scope="module")
def samples(
    server: APIThread, model: EagleFSD, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    options = {
        "model": NAME,
        "base_url": server.url + COMPLETIONS,
        "tokenizer_backend": "huggingface",
        "tokenizer": BUNDLED_TARGET,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    program = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    program += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    folder = tmp_path_factory.mktemp("lm-eval")
    return run_harness(program, folder, model, ["--batch_size", "3"])[0]


def test_choices_have_the_targets_log_likelihoods(samples: Samples, model: EagleFSD) -> None:
    check_choices(samples, model)


def test_log_likelihoods_of_whole_texts_are_the_targets(samples: Samples, model: EagleFSD) -> None:
    check_perplexity(samples, model)


def test_generated_answers_are_the_targets(samples: Samples, model: EagleFSD) -> None:
    check_answers(samples, model)
