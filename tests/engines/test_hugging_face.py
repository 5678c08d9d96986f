"""Repositories for ``model.generate(..., custom_generate="user/repo")``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import CERTIFICATE

from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET

#: Decodes with the repository of the first argument, in a process that imports transformers only.
PROGRAM = f"""
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

name, repository = {str(BUNDLED_TARGET)!r}, sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
messages = [{{"role": "user", "content": "Mia buys 4 boxes with 6 pencils in every box."}}]
options = dict(return_tensors="pt", return_dict=True, add_generation_prompt=True)
inputs = tokenizer.apply_chat_template(messages, **options)
trusted = dict(custom_generate=repository, trust_remote_code=True)
options = dict(**inputs, max_new_tokens=60, do_sample=False)
plain = model.generate(**options)
exact = model.generate(**options, **trusted, threshold=0.0)
loose = model.generate(**options, **trusted, threshold=1.0)
again = model.generate(**options, **trusted, threshold=1.0, streamer=TextStreamer(tokenizer))
assert "eagle_fsd" in sys.modules
print(json.dumps([plain.tolist(), exact.tolist(), loose.tolist(), again.tolist()]))
"""


def test_a_repository_decodes_with_its_drafter(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """At ``T = 0`` as ``generate`` does; the settings of a call and a streamer count."""
    out = tmp_path / "repository"
    status, _, errors = run("export", "custom-generate", out, "--drafter", BUNDLED_HEAD)
    assert status == 0, errors
    home = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | home,
    )
    assert done.returncode == 0, done.stderr
    *streamed, last = done.stdout.splitlines()
    plain, exact, loose, again = json.loads(last)
    assert exact == plain
    assert loose != plain
    assert again == loose
    assert "Mia" in "".join(streamed)


def test_the_card_names_target_settings_and_certificate(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    head, out = tmp_path / "head", tmp_path / "out"
    shutil.copytree(BUNDLED_HEAD, head)
    settings = {"rule": "regret", "certificate": CERTIFICATE}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = ("export", "custom-generate", out, "--drafter", head, "--target", "some/target")
    status, _, errors = run(*words, "--settings", tmp_path / "mine.json")
    assert status == 0, errors
    card = (out / "README.md").read_text()
    assert "tags:\n- custom_generate\n" in card
    assert 'from_pretrained("some/target")' in card
    assert "Settings: rule regret. accuracy on gsm8k: at most 0.96 points lost" in card
    assert json.loads((out / "fsd.json").read_text()) == settings
    assert (out / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert (out / "custom_generate" / "requirements.txt").read_text().startswith("eagle-fsd")

    (head / "fsd.json").unlink()
    assert run("export", "custom-generate", tmp_path / "plain", "--drafter", head)[0] == 0
    assert "Settings: lossless decoding." in (tmp_path / "plain" / "README.md").read_text()
    assert not (tmp_path / "plain" / "fsd.json").exists()


@pytest.mark.parametrize(
    ("drafter", "place", "words"),
    [
        ("ngram", "new", "ngram is not the folder of an EAGLE head or a draft model"),
        (str(BUNDLED_HEAD), ".", "exists; choose another folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    drafter: str,
    place: str,
    words: str,
) -> None:
    (tmp_path / "file").touch()
    status, _, errors = run("export", "custom-generate", tmp_path / place, "--drafter", drafter)
    assert status == 1
    assert words in errors
