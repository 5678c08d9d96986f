"""Exported heads as other engines read them, with :mod:`engine_reader` in their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_reader import FORMATS, read_head
from pairs import LINEAR_ROPE, LLAMA3_ROPE, MODEL_SIZES, prompt, tiny_target, untrained_head
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from eagle_fsd import EagleFSD, EagleHead, GenerateOutput, TreeConfig
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import ExportFormat
from eagle_fsd.train.export import convert_head

#: As in LLaMA 3.1, with a training context that suits the length of the sequences here.
ROPE = {**LLAMA3_ROPE, "rope_theta": 500000.0, "factor": 8.0}
#: The task: random sequences that repeat themselves, so that the next token is the one this many
#: positions back. The layers can only find it with the right RoPE.
PERIOD = 9
TOKENS = 12
#: A chain: every step drafts seven tokens.
CHAIN = TreeConfig(total_tokens=8, depth=7, top_k=1)


def sequences(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return ``[rows, length]`` ids with a period of :data:`PERIOD`."""
    start = torch.randint(1, TOKENS, (rows, PERIOD), generator=generator)
    return start.repeat(1, -(-length // PERIOD))[:, :length]


def fit(module: nn.Module, steps: int, loss: Callable[[Tensor], Tensor]) -> None:
    """Train a module on sequences of 48 tokens."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 10) * (1 - step / steps)
        loss(sequences(16, 48, generator)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    module.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def trained() -> EagleHead:
    """A head trained for a tiny target with LLaMA 3.1's RoPE, on the task that the target knows."""
    sizes = {**MODEL_SIZES, "vocab_size": TOKENS, "hidden_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, rope_parameters=ROPE))

    def target_loss(ids: Tensor) -> Tensor:
        logits = model(ids).logits[:, PERIOD - 1 : -1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, PERIOD:].flatten())

    def head_loss(ids: Tensor) -> Tensor:
        features = model.model(ids).last_hidden_state
        positions = torch.arange(ids.shape[1] - 1)[None]
        predicted = head(features[:, :-1], ids[:, 1:], positions)[:, PERIOD:-1]
        logs = head.log_probs(predicted)
        token_loss = F.nll_loss(logs.flatten(0, 1), ids[:, PERIOD + 2 :].flatten())
        return F.smooth_l1_loss(predicted, features[:, PERIOD + 1 : -1]) + token_loss

    fit(model, 100, target_loss)
    head = EagleHead(model.config, bias=False).attach(Target(model))
    fit(head, 300, head_loss)
    return head


def decode(head: EagleHead) -> GenerateOutput:
    """Continue four sequences after two periods."""
    ids = sequences(4, 2 * PERIOD, torch.Generator().manual_seed(1))
    out = EagleFSD(head.target.model, head, CHAIN).generate(ids, max_new_tokens=36, eos_token_id=[])
    expected = ids[:, :PERIOD].repeat(1, 6)
    assert (out.sequences == expected).float().mean() > 0.9, "the target does not know the task"
    return out


def export(head: EagleHead, folder: Path, engine: ExportFormat) -> Path:
    """Save a head and export it; return the export's folder."""
    save_head(head, folder / "head")
    return convert_head(folder / "head", head.target, folder / engine, engine)


@pytest.mark.slow
def test_export_of_a_trained_head_has_the_same_tau_elsewhere(
    trained: EagleHead, tmp_path: Path
) -> None:
    """It is lower without the settings of RoPE."""
    before = decode(trained)
    assert before.stats.tau > 4
    for engine in FORMATS:
        folder = export(trained, tmp_path, engine)
        for head in (load_head(folder, trained.target), read_head(folder, engine, trained.target)):
            after = decode(head)
            assert torch.equal(after.sequences, before.sequences)
            assert after.stats.tau == pytest.approx(before.stats.tau, rel=0.01)
    for missing in (("rope_theta",), ("rope_scaling",), ("rope_theta", "rope_scaling")):
        head = read_head(tmp_path / "vllm", "vllm", trained.target, **dict.fromkeys(missing))
        assert decode(head).stats.tau < 0.5 * before.stats.tau


def test_export_of_a_head_without_the_old_names_has_them(tmp_path: Path) -> None:
    """As heads were saved before."""
    target = Target(tiny_target())
    head = untrained_head(target.model, bias=False).attach(target)
    for engine in FORMATS:
        expected = (export(head, tmp_path, engine) / "config.json").read_text()
        config = json.loads((tmp_path / "head" / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling", "torch_dtype"):
            del config[name]
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        again = convert_head(tmp_path / "head", target, tmp_path / f"{engine}2", engine)
        assert (again / "config.json").read_text() == expected


def test_readers_compute_the_heads_features(tmp_path: Path) -> None:
    """The reader's modules have exactly the file's tensors, for every kind of bias."""
    llama, scaled = "llama-linear-rope-tied", "llama-grouped-llama3-rope"
    cases: list[tuple[str, ExportFormat, bool, dict[str, Any]]] = [
        (llama, "eagle", True, {}),
        (llama, "eagle", False, {}),
        (llama, "sglang", True, {}),
        (llama, "vllm", False, {}),
        (scaled, "sglang", False, {"attention_bias": True}),
        (scaled, "vllm", False, {"attention_bias": True}),
        ("qwen2", "eagle", True, {}),
        ("qwen2", "sglang", False, {}),
    ]
    for number, (architecture, engine, bias, changes) in enumerate(cases):
        target = Target(tiny_target(architecture, **changes))
        head = untrained_head(target.model, bias=bias).attach(target)
        folder = export(head, tmp_path / str(number), engine)
        inputs = torch.randn(1, 20, 32), prompt(20), torch.arange(20)[None]
        for other in (read_head(folder, engine, target), load_head(folder, target)):
            assert torch.allclose(other(*inputs), head(*inputs), rtol=1e-4, atol=1e-5)
        if architecture == llama:
            config = json.loads((folder / "config.json").read_text())
            assert config["rope_scaling"] == {"type": "linear", "factor": LINEAR_ROPE["factor"]}
