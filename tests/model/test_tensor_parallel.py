"""Targets whose layers are split over two processes decode what the whole target decodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensor_parallel_worker as worker
import torch
from launches import run_two
from pairs import MODEL_SIZES, aligned_pair, raises_one_line, tiny_target
from safetensors.torch import load_file, save_file

from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.loading import LoadError, load_target

TESTS = Path(__file__).parents[1]


def save_pair(folder: Path) -> None:
    """Write a target, and a head with the target's embedding, as published heads have one."""
    pair = aligned_pair()
    pair.model.save_pretrained(folder / "target")
    save_head(pair.drafter, folder / "head")
    weights = load_file(folder / "head" / "model.safetensors")
    weights["embed_tokens.weight"] = pair.target.embed.weight.detach()
    save_file(weights, folder / "head" / "model.safetensors")


@pytest.mark.slow
def test_both_processes_decode_what_one_decodes(tmp_path: Path) -> None:
    """Tokens, origins and numbers of passes are those of one process, also of pairs from files.

    The processes share each layer and agree on seeds, although their global generators differ. The
    fingerprint is that of the whole target, and the head's embedding is the target's.
    """
    save_pair(tmp_path)
    path = os.pathsep.join(map(str, (TESTS, TESTS / "model")))
    run = run_two(worker.__file__, tmp_path, PYTHONPATH=path)
    assert run.returncode == 0, run.stderr[-4000:]
    split = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    single, files = worker.results(aligned_pair().model), worker.from_files(tmp_path)
    sequences = [single[name][0] for name in worker.CALLS if name not in ("plain", "exact")]
    assert len({tuple(item.flatten().tolist()) for item in sequences}) >= 3
    assert files["own embedding"] is False
    for found in split:
        for name, expected in single.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0, msg=name)
        assert found["files"].pop("fingerprint") == files["fingerprint"]
        for name, result in found["files"].items():
            torch.testing.assert_close(result, files[name], rtol=0, atol=0)
        assert found["rows"] == MODEL_SIZES["intermediate_size"] // 2
        assert (found["agreed"], found["one_device"]) == (5, False)
    torch.testing.assert_close(split[0]["unseeded"], split[1]["unseeded"], rtol=0, atol=0)


def test_processes_that_were_not_started_raise_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target().save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises_one_line(r"cannot load the target .*torch\.distributed", LoadError):
        load_target(tmp_path, tp_plan="auto")
