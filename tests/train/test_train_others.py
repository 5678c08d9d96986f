"""Left out until the package does this."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from trainings import PATIENCE, command, start, train_here

from eagle_fsd import EagleHead
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target
from eagle_fsd.train.chats import ChatFile

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}


def test_a_full_disk_is_one_line_whatever_part_of_a_checkpoint_it_meets(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """safetensors has an error of its own that is no OSError."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    process = start(command(data, tmp_path / "out", target), preexec_fn=small_files)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "step 3 could not be written" in errors.splitlines()[-1]


def test_half_a_surrogate_is_no_text(target: Path, tmp_path: Path) -> None:
    """JSON can write it, no tokenizer takes it: the record is skipped, or the training lives."""
    bad = {"messages": [{"role": "user", "content": "hi \ud83d"}, GOOD["messages"][1]]}
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), json.dumps(bad)] * 4))
    train_here(path, tmp_path / "out", target, max_steps=4)


@pytest.mark.parametrize("element", ["17", '"text"', "null", "[]", '[{"messages": []}]'])
def test_elements_of_an_array_that_are_no_objects_are_counted(element: str, tmp_path: Path) -> None:
    """As they are in JSON Lines."""
    path = tmp_path / "chats.json"
    path.write_text(f"[{json.dumps(GOOD)},\n{element},\n{json.dumps(GOOD)}]")
    file = ChatFile(path)
    assert len(file) == 2
    assert [fault.line for fault in file.faults] == [2]


def test_a_head_with_an_embedding_of_its_own_can_be_begun_with(
    target: Path, data: Path, tmp_path: Path
) -> None:
    wrapped = Target(load_target(target))
    head = EagleHead(wrapped.config, False).attach(wrapped)
    head.embed_tokens = torch.nn.Embedding.from_pretrained(torch.randn_like(wrapped.embed.weight))
    save_head(head, tmp_path / "head")
    train_here(data, tmp_path / "out", target, head=tmp_path / "head", max_steps=2)
