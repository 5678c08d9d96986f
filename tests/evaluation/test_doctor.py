"""``eagle-fsd doctor`` finds planted faults, and none in a healthy pair.

At ``T = 0`` the answers do not depend on the drafter, so faulty drafters are examined on answers
that the bundled pair decoded once.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle_fsd import EagleFSD, EagleHead
from eagle_fsd.bundled import BUNDLED_EAGLE3, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.bundled.problems import chats, problems
from eagle_fsd.evaluation.doctor import checks
from eagle_fsd.evaluation.doctor.checks import (
    Finding,
    check_depth,
    check_length,
    check_settings,
    check_template,
    check_training_text,
    check_tree,
)
from eagle_fsd.evaluation.doctor.diagnosis import diagnose
from eagle_fsd.evaluation.doctor.measurements import Answer, LengthRow, Measurements
from eagle_fsd.evaluation.doctor.templates import candidate_templates, turn_template
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle3 import Eagle3Head, default_reads, layer_config
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.loading import load_drafter
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.eagle3_checkpoint import LAYER_IDS, save_eagle3
from eagle_fsd.utils.chat_templates import ChatTemplate, TokenizerTemplate

Run = Callable[..., tuple[int, str, str]]

QUESTIONS = [problem.question for problem in problems("test", 6)]
NEW_TOKENS = 48


class ReducedHead(EagleHead):
    """A head whose vocabulary is a part of the target's."""

    kept: Tensor  # [D] the target's tokens

    @property
    def vocab_size(self) -> int:
        return len(self.kept)

    def restrict_vocabulary(self, token_ids: Tensor | None) -> None:
        self.token_ids = token_ids  # which may be wrong

    def log_probs(self, hidden: Tensor) -> Tensor:
        return self.target.project(hidden)[..., self.kept].log_softmax(-1)


def measured_with(
    model: EagleFSD, template: ChatTemplate | None = None, questions: Sequence[str] = QUESTIONS
) -> Measurements:
    template = template or TokenizerTemplate(model.tokenizer)
    return Measurements(model, questions, template, NEW_TOKENS)


@pytest.fixture(scope="module")
def healthy() -> Measurements:
    """The answers of the bundled pair."""
    tree = TreeConfig(total_tokens=16, depth=6, top_k=2)
    return measured_with(EagleFSD.from_pretrained(tree=tree))


@pytest.fixture(scope="module")
def eagle3(healthy: Measurements, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an EAGLE-3 head that is linear in the hidden states, fitted in closed form.

    Attention and MLP are zero, so its logits are ``lm_head(fc(h))`` but for a positive factor. The
    product of the two is the least-squares prediction of the target's most likely tokens, projected
    to rank ``H``.
    """
    target, tokenizer = healthy.model.target, healthy.model.tokenizer
    reads, size = default_reads(len(target.layers)), target.hidden_size
    states, best = [], []
    for chat in islice(chats("train", seed=1), 60):
        text = healthy.chat_template.render(chat)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[:, :256]
        with torch.no_grad(), target.recording(reads) as recorded:
            logits = target.model(ids, use_cache=False).logits
        # The state at a position and the token after it predict the token after that.
        states.append(torch.cat([recorded[index][0, :-1] for index in reads], -1))
        best.append(logits[0, 1:].argmax(-1))
    x, y = torch.cat(states), torch.cat(best)
    token_ids = y.unique()
    head = Eagle3Head(layer_config(target.config), size, len(token_ids), reads)
    head.set_token_ids(token_ids)
    onehot = (y[:, None] == token_ids).float()
    ridge = 1e-2 * x.square().mean() * len(x) * torch.eye(len(x[0]))
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ onehot)  # [3 Ht, D]
    basis = torch.linalg.svd(x @ weights, full_matrices=False).Vh[:size]  # [H, D]
    with torch.no_grad():
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
        head.fc.weight.copy_((weights @ basis.T).T)
        head.lm_head.weight.copy_(basis.T)
    folder = tmp_path_factory.mktemp("eagle3")
    save_eagle3(head.attach(target), folder)
    return folder


@pytest.fixture
def no_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try no other chat templates, because that decodes the questions with each of them."""
    monkeypatch.setattr(checks, "candidate_templates", lambda tokenizer: [])


def with_drafter(
    healthy: Measurements, drafter: Drafter, target: LlamaForCausalLM | None = None
) -> Measurements:
    """Return the healthy pair's answers with another drafter."""
    old = healthy.model
    model = EagleFSD(target or old.model, drafter, old.tree, tokenizer=old.tokenizer)
    measured = Measurements(model, QUESTIONS, healthy.chat_template, NEW_TOKENS)
    measured.short, measured.long, measured.chains = healthy.short, healthy.long, healthy.chains
    return measured


def loaded(healthy: Measurements, folder: Path = BUNDLED_HEAD) -> Any:
    return load_drafter(folder, healthy.model.target)


def findings(measured: Measurements) -> dict[str, Finding]:
    assert measured.agreement is not None
    return {item.check: item for item in check_settings(measured, measured.agreement)}


def the_problem(measured: Measurements) -> Finding:
    """Return the only problem."""
    (found,) = [item for item in findings(measured).values() if item.level == "problem"]
    assert found.step is not None
    return found


def edited(folder: Path, source: Path, **changes: Any) -> Path:
    """Copy a checkpoint and change fields of its ``config.json``."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def permuted(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return another target of the same shapes: the same function with permuted hidden units."""
    other = copy.deepcopy(model)
    order = torch.randperm(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = ("o_proj.weight", "down_proj.weight")  # [H, ...]; all others are [..., H]
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(parameter.index_select(0 if name.endswith(outputs) else -1, order))
    return other


# -- healthy pairs and planted faults ------------------------------------------------------------


@pytest.mark.usefixtures("no_templates")
def test_healthy_eagle_2_head(healthy: Measurements) -> None:
    found = findings(healthy)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert list(found) == [
        *("dtype", "hidden states", "vocabulary", "RoPE", "chat template", "target")
    ]


@pytest.mark.usefixtures("no_templates")
def test_healthy_eagle_3_head(healthy: Measurements, eagle3: Path) -> None:
    found = findings(with_drafter(healthy, loaded(healthy, eagle3)))
    assert "problem" not in {finding.level for finding in found.values()}
    assert found["target"].level == "note"  # a linear head


@pytest.mark.usefixtures("no_templates")
def test_healthy_bundled_eagle_3_head(healthy: Measurements) -> None:
    found = findings(with_drafter(healthy, loaded(healthy, BUNDLED_EAGLE3)))
    assert {finding.level for finding in found.values()} == {"ok"}


@pytest.mark.parametrize("theta", [100.0, 500_000.0])
@pytest.mark.usefixtures("no_templates")
def test_wrong_theta(healthy: Measurements, theta: float, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    copied = edited(tmp_path / "head", BUNDLED_HEAD, rope_parameters=rope, rope_theta=theta)
    found = the_problem(with_drafter(healthy, loaded(healthy, copied)))
    assert found.check == "RoPE"
    assert found.evidence.startswith(f"theta {theta:.0f}; target theta 10000; agreement ")
    assert found.step == "correct the RoPE in the drafter's config.json: theta 10000"


@pytest.mark.parametrize("offset", [-2, 2])  # loading resolves numberings that differ by one
@pytest.mark.usefixtures("no_templates")
def test_wrong_layer_offset(
    healthy: Measurements, eagle3: Path, offset: int, tmp_path: Path
) -> None:
    ids = [index - 1 + offset for index in (2, 7, 11)]
    fields = {"eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True}}
    head = loaded(healthy, edited(tmp_path / "head", eagle3, **fields))
    assert head.reads == tuple(index + 1 for index in ids)
    found = the_problem(with_drafter(healthy, head))
    assert found.check == "hidden states"
    assert str(found.step).endswith("so that it reads the inputs of layers 2, 7, 11")


@pytest.fixture(scope="module")
def many(healthy: Measurements) -> Measurements:
    """Twice as many answers as the command decodes by default, for small differences."""
    questions = [problem.question for problem in problems("test", 24)]
    measured = Measurements(healthy.model, questions, healthy.chat_template, 64)
    _ = measured.short, measured.long
    measured.chains = healthy.chains
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("folder", [BUNDLED_HEAD, BUNDLED_EAGLE3], ids=["eagle2", "eagle3"])
@pytest.mark.usefixtures("no_templates")
def test_bundled_heads_are_healthy_on_many_answers(many: Measurements, folder: Path) -> None:
    found = findings(with_drafter(many, loaded(many, folder)))
    assert {finding.level for finding in found.values()} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-2, -1, 1, 2])
@pytest.mark.usefixtures("no_templates")
def test_wrong_layer_offset_of_the_bundled_eagle_3_head(
    many: Measurements, offset: int, tmp_path: Path
) -> None:
    """Also by one, which costs 3 % of the tokens."""
    reads = [index + offset for index in (2, 7, 11)]
    fields: dict[str, Any] = {"eagle_config": {}, LAYER_IDS: reads}
    if offset < 0:  # of two ways to write the layers, the one that loading does not doubt
        fields = {"eagle_config": {LAYER_IDS: [index - 1 for index in reads]}}
    head = loaded(many, edited(tmp_path / "head", BUNDLED_EAGLE3, **fields))
    assert head.reads == tuple(reads)
    found = the_problem(with_drafter(many, head))
    assert found.check == "hidden states"
    assert str(found.step).endswith("so that it reads the inputs of layers 2, 7, 11")


@pytest.mark.slow
@pytest.mark.usefixtures("no_templates")
def test_shuffled_d2t_of_the_bundled_eagle_3_head(many: Measurements, tmp_path: Path) -> None:
    found = the_problem(
        with_drafter(many, loaded(many, with_shuffled_d2t(tmp_path, BUNDLED_EAGLE3)))
    )
    assert found.check == "vocabulary"
    assert "d2t" in str(found.step)


@pytest.mark.slow
@pytest.mark.parametrize("theta", [100.0, 500_000.0])
@pytest.mark.usefixtures("no_templates")
def test_wrong_theta_of_the_bundled_eagle_3_head(
    many: Measurements, theta: float, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    copied = edited(tmp_path / "head", BUNDLED_EAGLE3, rope_parameters=rope, rope_theta=theta)
    found = the_problem(with_drafter(many, loaded(many, copied)))
    assert found.check == "RoPE"
    assert found.step == "correct the RoPE in the drafter's config.json: theta 10000"


@pytest.mark.usefixtures("no_templates")
def test_wrong_layer_of_an_eagle_2_head(healthy: Measurements) -> None:
    head = loaded(healthy)
    head.reads = (13,)
    found = the_problem(with_drafter(healthy, head))
    assert found.check == "hidden states"
    assert found.evidence.startswith("the input of layer 13; agreement ")
    assert found.evidence.endswith("with the last hidden state")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.usefixtures("no_templates")
def test_head_of_another_target(healthy: Measurements, eagle3: Path, kind: str) -> None:
    other = permuted(healthy.model.model)
    head = loaded(healthy, BUNDLED_HEAD if kind == "eagle2" else eagle3)
    measured = with_drafter(healthy, head, other)
    question = [{"role": "user", "content": QUESTIONS[0]}]
    (answer,) = measured.answer(healthy.chat_template, [question])
    assert answer.ids.equal(healthy.short[0].ids)  # so the answers are this target's, too
    found = the_problem(measured)
    assert found.check == "target"
    assert "trained for this target" in str(found.step)


def shuffled(tokens: Tensor) -> Tensor:
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


@pytest.mark.slow
@pytest.mark.usefixtures("no_templates")
def test_shuffled_map(healthy: Measurements) -> None:
    head = loaded(healthy)
    head.__class__ = ReducedHead
    head.kept = head.token_ids = torch.cat([answer.ids for answer in healthy.short]).unique()
    found = findings(with_drafter(healthy, head))
    assert {finding.level for finding in found.values()} == {"ok"}
    head.token_ids = shuffled(head.kept)
    problem = the_problem(with_drafter(healthy, head))
    assert problem.check == "vocabulary"
    assert problem.evidence.endswith("with a map in ascending order")
    head.token_ids = head.kept + torch.arange(len(head.kept))  # read as offsets, but they are ids
    problem = the_problem(with_drafter(healthy, head))
    assert problem.evidence.endswith("with a map of ids, not offsets")
    # Without the right map at hand, one is estimated from the answers.
    order = shuffled(torch.arange(len(head.kept)))
    head.kept, head.token_ids = head.kept[order], head.kept
    problem = the_problem(with_drafter(healthy, head))
    assert problem.evidence.endswith("with a map estimated from the answers")


def with_shuffled_d2t(tmp_path: Path, source: Path) -> Path:
    """Copy a checkpoint and shuffle its vocabulary map."""
    copied = edited(tmp_path / "head", source)
    weights = load_file(copied / "model.safetensors")
    first = torch.arange(len(weights["d2t"]))
    weights["d2t"] = shuffled(weights["d2t"] + first) - first
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    return copied


@pytest.mark.usefixtures("no_templates")
def test_shuffled_d2t_in_a_file(healthy: Measurements, eagle3: Path, tmp_path: Path) -> None:
    found = the_problem(with_drafter(healthy, loaded(healthy, with_shuffled_d2t(tmp_path, eagle3))))
    assert found.check == "vocabulary"
    assert "d2t" in str(found.step)


def test_wrong_template(healthy: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = healthy.model.tokenizer
    own, *others = candidate_templates(tokenizer)
    assert isinstance(own[1], TokenizerTemplate)
    kept = [item for item in others if item[0].startswith("role tokens")]
    monkeypatch.setattr(checks, "candidate_templates", lambda tokenizer: kept)
    chatml = turn_template(tokenizer, "<|im_start|>{role}\n{content}<|im_end|>\n")
    found = check_template(measured_with(healthy.model, chatml))
    assert found.level == "problem"
    assert "<|im_start|>, <|im_end|> not in the target's vocabulary" in found.evidence
    assert "'<|{role}|>{content}<|end|>'" in str(found.step)
    assert check_template(healthy).level == "ok"


@pytest.mark.slow
@pytest.mark.usefixtures("no_templates")
def test_draft_model(healthy: Measurements) -> None:
    drafter = DraftModel(copy.deepcopy(healthy.model.model))
    found = findings(with_drafter(healthy, drafter))
    assert found["target"].evidence.startswith("agreement 100.0%")
    assert {finding.level for finding in found.values()} == {"ok"}
    assert list(found) == ["dtype", "vocabulary", "RoPE", "chat template", "target"]
    assert findings(with_drafter(healthy, drafter)) == found
    config = copy.deepcopy(drafter.model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    other = LlamaForCausalLM(config)
    other.load_state_dict(drafter.model.state_dict())
    assert the_problem(with_drafter(healthy, DraftModel(other))).check == "RoPE"


# -- further findings ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_templates")
def test_broken_weights(healthy: Measurements) -> None:
    head = loaded(healthy)
    head.fc.weight.data[0, 0] = torch.inf
    found = the_problem(with_drafter(healthy, head))
    assert found.check == "dtype"
    assert "100.0% of the draft's distributions are NaN or infinite" in found.evidence


@pytest.mark.usefixtures("no_templates")
def test_dtype_is_compared_with_float32_and_restored(healthy: Measurements) -> None:
    head = loaded(healthy)
    weights = {name: item.clone() for name, item in head.state_dict().items()}
    inverse = head.rotary.inv_freq.clone()
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16()
    found = findings(with_drafter(healthy, head))["dtype"]
    assert found.level == "ok"
    assert found.evidence.startswith("bfloat16; target float32; agreement ")
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    for name, item in head.state_dict().items():
        assert item.equal(weights[name].bfloat16())
    assert head.rotary.inv_freq.equal(inverse)


@pytest.mark.usefixtures("no_templates")
def test_dtype_of_a_draft_model_is_compared_with_float32(healthy: Measurements) -> None:
    """Its weights are restored."""
    draft = copy.deepcopy(healthy.model.model).bfloat16()
    drafter = DraftModel(draft)
    before = [(item.dtype, item.data_ptr()) for item in draft.parameters()]
    found = findings(with_drafter(healthy, drafter))["dtype"]
    assert found.level == "ok"
    assert found.evidence.startswith("bfloat16; target float32; agreement ")
    assert found.evidence.endswith(" with float32")
    assert [(item.dtype, item.data_ptr()) for item in draft.parameters()] == before


def text_of(answers: Sequence[Answer]) -> list[tuple[Tensor, Tensor]]:
    return [(item.ids, torch.arange(len(item.ids)) >= item.start) for item in answers]


def test_training_text(healthy: Measurements) -> None:
    target = healthy.model.target
    own = check_training_text(target, text_of(healthy.short))
    assert own.level == "ok"
    assert own.evidence.startswith("100.0% of ")
    # Half of the text of another writer.
    generator = torch.Generator().manual_seed(0)
    foreign = [replace(a, ids=a.ids.clone()) for a in healthy.short]
    for answer in foreign:
        places = torch.arange(answer.start, len(answer.ids), 4)
        answer.ids[places] = torch.randint(3, 1024, places.shape, generator=generator)
    found = check_training_text(target, text_of(foreign))
    assert found.level == "note"
    assert "eagle-fsd train regenerate" in str(found.step)
    empty = check_training_text(
        target, [(torch.tensor([1, 2, 3]), torch.tensor([True, False, False]))]
    )
    assert (empty.level, empty.evidence) == ("note", "no answer tokens")


class Rows:
    """Measurements that consist of their tables."""

    def __init__(
        self,
        drafter: Drafter,
        by_length: Sequence[LengthRow] = (),
        by_depth: Sequence[tuple[int, float]] = (),
        accepted: Sequence[int] = (),
    ) -> None:
        self.model = SimpleNamespace(drafter=drafter, tree=TreeConfig(depth=4))
        self.by_length, self.by_depth = by_length, by_depth
        self.short = [Answer(torch.arange(9), 1, [*accepted, 1])]


def test_depth(healthy: Measurements) -> None:
    rows = [(200, 0.8), (100, 0.7), (66, 0.5)]
    found = check_depth(Rows(healthy.model.drafter, by_depth=rows))
    assert found == Finding(
        "depth",
        "note",
        "accepted 80.0% at depth 1, 50.0% from depth 3 on",
        "train the head on its own outputs: eagle-fsd train --unroll 3",
    )
    assert check_depth(Rows(NGramDrafter(), by_depth=rows)).level == "ok"
    rows[2] = (66, 0.7)
    assert check_depth(Rows(healthy.model.drafter, by_depth=rows)).level == "ok"
    assert check_depth(Rows(healthy.model.drafter, by_depth=rows[:2])).level == "ok"


def test_context_length(healthy: Measurements) -> None:
    drafter = healthy.model.drafter
    for share, tokens, level in ((0.4, 128, "note"), (0.85, 128, "ok"), (0.7, 50, "ok")):
        short = LengthRow(0, 127, 9, 4.0, tokens, 0.9)
        found = check_length(Rows(drafter, [short, LengthRow(128, 255, 9, 2.0, tokens, share)]))
        assert found.level == level
        assert found.evidence == f"agreement 90.0% at 0-127 tokens, {share:.1%} at 128-255 tokens"
    few = LengthRow(128, 255, 9, 2.0, 49, 0.4)
    found = check_length(Rows(drafter, [short, few]))
    assert found.evidence == "all contexts are of similar length"


def test_tree(healthy: Measurements) -> None:
    found = check_tree(Rows(healthy.model.drafter, accepted=[6, 6, 3, 1]))
    assert found == Finding(
        "tree",
        "note",
        "50% of the steps accept the longest path, 5 tokens",
        "try trees deeper than --depth 4",
    )
    assert check_tree(Rows(healthy.model.drafter, accepted=[6, 3, 3, 1])).level == "ok"


# -- the whole diagnosis and the command ---------------------------------------------------------


def test_drafter_without_a_network_gets_tables(healthy: Measurements) -> None:
    old = healthy.model
    model = EagleFSD(old.model, NGramDrafter(), old.tree, tokenizer=old.tokenizer)
    diagnosis = diagnose(model, QUESTIONS[:2], healthy.chat_template, max_new_tokens=16)
    assert diagnosis.healthy
    found = json.loads(json.dumps(diagnosis.as_dict()))
    assert found["agreement"] is None
    assert [finding["check"] for finding in found["findings"]] == ["tree"]
    assert found["tau"] >= 1.0
    assert sum(row["steps"] for row in found["by_length"]) > 4
    assert all(row["agreement"] is None for row in found["by_length"])


def test_questions_must_fit_the_context(healthy: Measurements) -> None:
    long = "apples " * 3000
    with pytest.raises(ValueError, match="no question leaves room for an answer"):
        _ = measured_with(healthy.model, questions=[long]).short
    measured = measured_with(healthy.model, questions=[long, QUESTIONS[0]])
    assert len(measured.short) == len(measured.chains) == 1


def report(run: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Run ``doctor --json``; return its exit status and findings by name."""
    small = ("--prompts", "bundled", "--count", 6, "--max-new-tokens", NEW_TOKENS)
    status, out, _ = run("doctor", "--json", *small, *arguments)
    return status, json.loads(out)


@pytest.mark.slow
def test_command_on_the_bundled_pair(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    written = list(islice(chats("train", seed=5), 40))
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in written))
    status, found = report(run, "--data", data)
    assert status == 0
    assert found["healthy"]
    assert found["next_step"] is None
    assert [finding["check"] for finding in found["findings"]] == [
        *("dtype", "hidden states", "vocabulary", "RoPE", "chat template", "target"),
        *("training text", "context length", "depth", "tree"),
    ]
    assert 0.7 < found["agreement"] < 1.0


@pytest.mark.slow
def test_command_prints_a_wrong_template(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(BUNDLED_TARGET, target)
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    status, found = report(run, "--target", target, "--drafter", BUNDLED_HEAD)
    assert status == 1
    assert not found["healthy"]
    (problem,) = [item for item in found["findings"] if item["level"] == "problem"]
    assert problem["check"] == "chat template"
    assert problem["step"] == found["next_step"]
    assert "'<|{role}|>{content}<|end|>'" in problem["step"]


@pytest.mark.slow
def test_command_finds_an_overridden_template(run: Run) -> None:
    status, found = report(run, "--conv-template", "vicuna_v1.1", "--count", 12)
    assert status == 1
    assert found["next_step"] == "do not pass --conv-template"


def test_command_prints_tables(run: Run) -> None:
    small = ("--prompts", "bundled", "--count", 2, "--max-new-tokens", 24)
    status, out, _ = run("doctor", *small, "--drafter", "ngram", "--target", BUNDLED_TARGET)
    assert status == 0
    assert out.startswith("NGramDrafter: tau ")
    assert out.rstrip().endswith("Nothing to repair.")
