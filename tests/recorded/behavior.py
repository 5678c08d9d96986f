"""What the package does, observed through its public interfaces, as plain JSON values.

``python tests/recorded/behavior.py`` observes everything and writes one JSON file per area beside
this module. The files in the repository were first written at revision 68e5df3, and again after
each intended change of behavior; ``test_recorded.py`` checks that the package still behaves that
way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

QUESTIONS = (
    "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?",
    "Anna gathers 12 buckets of 4 shells each. Then Anna uses 5 shells. How many shells are left"
    " in the end?",
    "At the market, Tom buys 7 boxes with 3 apples in every box. Then Tom gives 4 apples to Mia."
    " How many apples are left in the end?",
    "Hello!",
)

#: Options of each recorded decoding; every one runs on two questions one by one, and on all as a
#: batch.
DECODINGS: dict[str, dict[str, Any]] = {
    "settings of the pair": {},
    "exact": {"threshold": 0.0},
    "plain": {"method": "ar"},
    "T 0.4": {"threshold": 0.4, "min_ratio": 0.0},
    "T 0.1, r 0.1": {"threshold": 0.1, "min_ratio": 0.1},
    "total variation": {"threshold": 0.2, "divergence": "tv", "min_ratio": 0.0},
    "top-k KL": {"threshold": 0.2, "divergence": "top_k_kl", "min_ratio": 0.0},
    "stop": {"threshold": 0.1, "fallback": "stop"},
    "target's child": {"threshold": 0.4, "min_ratio": 0.0, "selection": "target"},
    "sampled plain": {"method": "ar", "temperature": 1.0, "seed": 1},
    "sampled exact": {"threshold": 0.0, "temperature": 1.0, "seed": 2},
    "sampled fuzzy": {"threshold": 0.4, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    "sampled top-k": {"threshold": 0.1, "temperature": 1.2, "top_k": 20, "seed": 4},
    "sampled warped": {"threshold": 0.1, "temperature": 0.7, "divergence_on": "warped", "seed": 5},
    "drawn from the draft": {
        "threshold": 0.4,
        "temperature": 1.0,
        "selection": "sample",
        "seed": 6,
    },
}
NEW_TOKENS = 48
METHODS = ("plain", "exact", "fsd", "rules")
#: Of an answer line: what differs from run to run.
VOLATILE_ANSWER = ("answer_id", "session", "tstamp")
VOLATILE_CHOICE = ("wall_time", "latency", "memory")

TRAINING = {
    "max-steps": 6,
    "batch-size": 2,
    "max-length": 64,
    "warmup": 0,
    "lr": 1e-3,
    "validation": 0,
    "checkpoint-every": 3,
    "log-every": 1,
}
FORMATS = ("eagle", "sglang", "vllm")

NAME = "eagle-fsd-bundled"
CHAT = [{"role": "user", "content": QUESTIONS[0]}]
EXACT = {"threshold": 0.0}
#: Chats: what each changes of a greedy request.
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat, exact": {"fsd": EXACT},
    "chat, streamed": {
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "chat, two sampled choices": {"temperature": 1, "seed": 7, "n": 2, "max_tokens": 32},
    "chat, stop string": {"stop": ["="]},
    "chat, log-probabilities": {"max_tokens": 4, "logprobs": True, "top_logprobs": 2, "fsd": EXACT},
}
GREEDY_CHAT = {"messages": CHAT, "temperature": 0, "max_tokens": 64}
#: Requests to the OpenAI-compatible API: path and body (None: a GET).
REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("models", None),
    **{name: ("chat/completions", {**GREEDY_CHAT, **changes}) for name, changes in CHATS.items()},
    "completion": (
        "completions",
        {"prompt": "Mia has 8 apples", "temperature": 0, "max_tokens": 16, "fsd": EXACT},
    ),
    "embedding": ("embeddings", {"input": "Mia has 8 apples"}),
}


def observe_decoding() -> dict[str, Any]:
    """Tokens, origins and statistics of the bundled pair under :data:`DECODINGS`."""
    import torch

    from eagle_fsd import EagleFSD

    torch.set_num_threads(1)
    model = EagleFSD.from_pretrained()
    prompts = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        for question in QUESTIONS
    ]
    together = model.tokenizer.pad(
        {"input_ids": [ids[0] for ids in prompts]}, padding_side="left", return_tensors="pt"
    )
    calls = [{"input_ids": ids} for ids in prompts[::3]] + [dict(together)]
    found = {}
    for name, options in DECODINGS.items():
        given = dict(options)
        acceptance = {
            field: given.pop(field)
            for field in type(model.acceptance).model_fields
            if field in given
        }
        outputs = [
            model.generate(
                **call,
                max_new_tokens=NEW_TOKENS,
                acceptance=model.acceptance.updated(**acceptance),
                **given,
            )
            for call in calls
        ]
        found[name] = [
            {
                "tokens": out.sequences[:, call["input_ids"].shape[1] :].tolist(),
                "origins": out.origins.tolist(),
                "accepted": out.stats.accepted,
                "passes": out.stats.passes,
                "prefilled": out.stats.prefilled,
                "tau": out.stats.tau,
            }
            for call, out in zip(calls, outputs, strict=True)
        ]
    return found


def observe_evaluation() -> dict[str, Any]:
    """Answer files and report of ``evaluate``."""
    with tempfile.TemporaryDirectory() as name:
        evaluated = Path(name)
        common = ["--count", "2", "--max-new-tokens", "96"]
        run(["evaluate", *common, "--method", *METHODS, "--out", evaluated])
        files = {file.name: file.read_text() for file in sorted(evaluated.glob("*.jsonl"))}
        answers = {}
        for file, text in files.items():
            lines = [json.loads(line) for line in text.splitlines()]
            for line in lines:
                for key in VOLATILE_ANSWER:
                    del line[key]
                for key in VOLATILE_CHOICE:
                    del line["choices"][0][key]
            answers[file] = lines
        report = json.loads((evaluated / "report.json").read_text())
        kept = ("method", "answers", "failed", "tokens", "cut_off", "tau", "reach", "origins")
        kept += ("accuracy", "accuracy_interval", "scored", "log_likelihood", "settings")
        return {
            "answers": answers,
            "rows": [{key: row[key] for key in kept} for row in report["rows"]],
            "files": sorted(file.name for file in evaluated.iterdir()),
        }


def observe_training() -> dict[str, Any]:
    """Weights, configuration and metrics of a short training, and what exports hold."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chats, head = folder / "chats.jsonl", folder / "head"
        options = [part for key, value in TRAINING.items() for part in (f"--{key}", value)]
        export = ["train", "export", "--head", head, "--format"]
        run(
            ["train", "chats", "--out", chats, "--count", 12, "--seed", 5],
            ["train", "--data", chats, "--out", head, *options],
            *([*export, format_, "--out", folder / format_] for format_ in FORMATS),
        )
        metrics = [json.loads(line) for line in (head / "metrics.jsonl").read_text().splitlines()]
        found: dict[str, Any] = {
            "weights": {
                key: [list(value.shape), float(value.double().sum()), float(value.norm())]
                for key, value in sorted(load_file(head / "model.safetensors").items())
            },
            "config": json.loads((head / "config.json").read_text()),
            "loss": [line["loss"] for line in metrics if line["kind"] == "train"],
            "exports": {},
        }
        for format_ in FORMATS:
            out = folder / format_
            config = json.loads((out / "config.json").read_text())
            del config["eagle_fsd_fingerprints"]  # of weights, whose last digits may differ
            found["exports"][format_] = {
                "files": sorted(file.name for file in out.iterdir()),
                "config": config,
            }
        return found


def observe_openai() -> dict[str, Any]:
    """Responses of ``serve`` to :data:`REQUESTS`, without their identifiers and times."""
    sys.path.append(str(HERE.parent))  # where pytest finds it, too
    from api_servers import ServerProcess

    server, found = ServerProcess("serve", **environment()), {}
    try:
        for name, (path, body) in REQUESTS.items():
            if body is None:
                reply = server.http.get(f"/v1/{path}")
            else:
                reply = server.http.post(f"/v1/{path}", json={"model": NAME, **body})
            found[name] = [reply.status_code, stable(reply.text)]
        return found
    finally:
        server.stop()


def stable(text: str) -> Any:
    """A response, or the events of a stream, without what differs from one to the next."""
    if text.startswith("data:"):
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        return [stable(event) if event != "[DONE]" else event for event in events]

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: re.sub(r"(?<=-)[0-9A-Za-z]{20,}$", "*", item)
                if key in ("id", "root")
                else strip(item)
                for key, item in value.items()
                if key not in ("created", "permission", "tokens_per_second")
            }
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(json.loads(text))


def run(*commands: list[Any]) -> None:
    """Run commands of ``eagle-fsd`` in one process; an error shows what it printed."""
    words = [[*map(str, command)] for command in commands]
    program = "import sys\nfrom eagle_fsd.cli import main\n"
    program += f"for words in {words!r}:\n    sys.argv = ['eagle-fsd', *words]\n    main()\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment() -> dict[str, str]:
    """One thread on the CPU: sums do not depend on how many cores the machine has."""
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}


AREAS: dict[str, Callable[[], dict[str, Any]]] = {
    "decoding": observe_decoding,
    "evaluation": observe_evaluation,
    "training": observe_training,
    "openai": observe_openai,
}


def main() -> None:
    """Write what is observed now beside this module."""
    for area in sys.argv[1:] or AREAS:
        begun = time.monotonic()
        text = json.dumps(AREAS[area](), indent=None, separators=(",", ":"), sort_keys=True)
        (HERE / f"{area}.json").write_text(text + "\n")
        sys.stderr.write(f"{area}: {len(text)} bytes, {time.monotonic() - begun:.0f} s\n")


if __name__ == "__main__":
    main()
