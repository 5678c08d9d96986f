"""Targets whose layers are split over two processes decode what the whole target decodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_worker as worker
import torch
from pairs import MODEL_SIZES, aligned_pair, raises_one_line, tiny_target
from safetensors.torch import load_file, save_file

from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.loading import LoadError, load_target

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.xdist_group("tensor_parallel")  # one launch serves all tests


def save_pair(folder: Path) -> None:
    """Write a target, and a head with the target's embedding, as published heads have one."""
    pair = aligned_pair()
    pair.model.save_pretrained(folder / "target")
    save_head(pair.drafter, folder / "head")
    weights = load_file(folder / "head" / "model.safetensors")
    weights["embed_tokens.weight"] = pair.target.embed.weight.detach()
    save_file(weights, folder / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes decoded."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    save_pair(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS / "model")))
    command = [sys.executable, *TORCHRUN, worker.__file__, folder]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
def test_both_processes_decode_what_one_decodes(split: list[dict[str, Any]]) -> None:
    """Two processes produce the same tokens, origins and number of passes as one, in float32."""
    single = worker.results(aligned_pair().model)
    sequences = [single[name][0] for name in worker.CALLS if name not in ("plain", "exact")]
    assert len({tuple(item.flatten().tolist()) for item in sequences}) >= 3
    for found in split:
        for name, expected in single.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.slow
def test_pairs_from_files_decode_what_one_process_decodes(
    split: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The fingerprint is that of the whole target, and the head's embedding is the target's."""
    save_pair(tmp_path)
    expected = worker.from_files(tmp_path)
    assert expected["own embedding"] is False
    for found in split:
        assert found["files"].pop("fingerprint") == expected["fingerprint"]
        for name, result in found["files"].items():
            torch.testing.assert_close(result, expected[name], rtol=0, atol=0)


@pytest.mark.slow
def test_layers_are_split_and_numbers_agreed(split: list[dict[str, Any]]) -> None:
    """Processes share each layer and agree on seeds, although their global generators differ."""
    torch.testing.assert_close(split[0]["unseeded"], split[1]["unseeded"], rtol=0, atol=0)
    assert [found["rows"] for found in split] == [MODEL_SIZES["intermediate_size"] // 2] * 2
    assert [found["agreed"] for found in split] == [5, 5]
    assert [found["one_device"] for found in split] == [False, False]


def test_processes_that_were_not_started_raise_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target().save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises_one_line(r"cannot load the target .*torch\.distributed", LoadError):
        load_target(tmp_path, tp_plan="auto")
