"""``eagle-fsd doctor`` finds planted faults, and none in a healthy pair.

At ``T = 0`` the answers do not depend on the drafter, so faulty drafters are examined on answers
that the bundled pair decoded once.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import (
    BUNDLED_DRAFT_MODEL,
    BUNDLED_DRAFTERS,
    BUNDLED_EAGLE3,
    BUNDLED_HEAD,
    BUNDLED_TARGET,
    SMOLLM2_HEADS,
)
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
from eagle_fsd.evaluation.doctor.diagnosis import GENERAL_QUESTIONS, diagnose
from eagle_fsd.evaluation.doctor.measurements import MeasuredAnswer, Measurements
from eagle_fsd.evaluation.doctor.settings import find_settings
from eagle_fsd.evaluation.doctor.templates import TurnTemplate, candidate_templates, unknown_markers
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle3 import Eagle3Head, default_reads, layer_config
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.loading import load_drafter
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.eagle3_checkpoint import LAYER_IDS
from eagle_fsd.utils.chat_templates import (
    ChatTemplate,
    FastChatTemplate,
    TokenizerTemplate,
    encode_prompt,
)

Run = Callable[..., tuple[int, str, str]]

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"

pytestmark = pytest.mark.xdist_group("doctor")

QUESTIONS = [problem.question for problem in problems("test", 6)]
NEW_TOKENS = 47


def measured_with(
    model: EagleFSD, template: ChatTemplate | None = None, questions: Sequence[str] = QUESTIONS
) -> Measurements:
    template = template or TokenizerTemplate(model.tokenizer)
    return Measurements(model, questions, template, NEW_TOKENS)


@pytest.fixture(scope="module")
def healthy() -> Measurements:
    """The answers of the bundled pair, without long contexts."""
    tree = TreeConfig(total_tokens=16, depth=6, top_k=2)
    measured = measured_with(EagleFSD.from_pretrained(tree=tree))
    measured.long = []
    return measured


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
    measured.short, measured.long = healthy.short, healthy.long
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


def test_settings_that_choose_plain_decoding_are_diagnosed_with_a_tree(model: EagleFSD) -> None:
    pair = copy.copy(model)
    pair.exact_tree = TreeConfig(total_tokens=1, depth=1)
    found = diagnose(pair, QUESTIONS[:1], max_new_tokens=8)
    assert found["tree"]["total_tokens"] > 1
    assert found["tau"] > 1.5


@pytest.mark.usefixtures("no_templates")
def test_healthy_drafters(healthy: Measurements) -> None:
    for name in BUNDLED_DRAFTERS.keys() - SMOLLM2_HEADS.keys():
        drafter = loaded(healthy, BUNDLED_DRAFTERS[name])
        found = findings(with_drafter(healthy, drafter))
        assert {finding.level for finding in found.values()} == {"ok"}
        of_heads = ["hidden states", "input order"] if drafter.reads else []
        assert list(found) == ["dtype", *of_heads, "vocabulary", "RoPE", "chat template", "target"]


Weights = dict[str, Tensor]
ATTENTION = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]


def reverse(count: int, *names: str) -> Callable[[Weights], None]:
    """Reverse the order of equal parts of the columns."""

    def edit(weights: Weights) -> None:
        for name in names:
            weights[name] = torch.cat(weights[name].chunk(count, 1)[::-1], 1).contiguous()

    return edit


def shuffle_map(weights: Weights) -> None:
    first = torch.arange(len(weights["d2t"]))
    weights["d2t"] = shuffled(weights["d2t"] + first) - first


def store_ids(weights: Weights) -> None:
    """Keep tokens that are in the vocabulary even if their ids are read as offsets."""
    ids = (weights["d2t"] + torch.arange(len(weights["d2t"])))[:280]
    weights |= {"d2t": ids, "lm_head.weight": weights["lm_head.weight"][:280].contiguous()}
    del weights["t2d"]


def shuffle_projection(weights: Weights) -> None:
    weights["lm_head.weight"] = shuffled(weights["lm_head.weight"])


def shuffle_embedding(weights: Weights) -> None:
    embedding = load_file(BUNDLED_TARGET / "model.safetensors")["model.embed_tokens.weight"]
    weights["embed_tokens.weight"] = shuffled(embedding)


def shuffled(rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}


@dataclass
class Fault:
    """What is wrong with a copy of a bundled head, and what the diagnosis should say."""

    name: str
    folder: Path
    check: str
    step: str
    config: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[Weights], object] = lambda weights: None


#: The bundled EAGLE-3 head reads the inputs of layers 2, 7, 11. Of two ways to write wrong ones,
#: each is the one that loading does not doubt.
BELOW = {"eagle_config": {LAYER_IDS: [0, 5, 9]}}
ABOVE = {"eagle_config": {}, LAYER_IDS: [3, 8, 12]}
FC = "fc.weight"
READS, ORDER, MAP = "so that it reads the inputs of layers 2, 7, 11", "input order", "vocabulary"
FAULTS = [
    Fault("theta", BUNDLED_HEAD, "RoPE", "json: theta 10000", rope(500_000.0)),
    Fault("theta of EAGLE-3", BUNDLED_EAGLE3, "RoPE", "json: theta 10000", rope(100.0)),
    Fault("layers - 1", BUNDLED_EAGLE3, "hidden states", READS, BELOW),
    Fault("layers + 1", BUNDLED_EAGLE3, "hidden states", READS, ABOVE),
    Fault("fc", BUNDLED_HEAD, ORDER, "halves of fc", {}, reverse(2, FC)),
    Fault("layers of fc", BUNDLED_EAGLE3, ORDER, "11, 7, 2", {}, reverse(3, FC)),
    Fault("q", BUNDLED_EAGLE3, ORDER, "v_proj", {}, reverse(2, *ATTENTION)),
    Fault("embedding", BUNDLED_HEAD, "embedding", "remove embed_tokens", {}, shuffle_embedding),
    Fault("d2t", BUNDLED_EAGLE3, MAP, "a map in ascending order fits", {}, shuffle_map),
    Fault("ids", BUNDLED_EAGLE3, MAP, "not offsets fits", {"draft_vocab_size": 280}, store_ids),
    Fault("lm_head", BUNDLED_EAGLE3, MAP, "estimated from the answers", {}, shuffle_projection),
    Fault("NaN", BUNDLED_HEAD, "dtype", "replace the", {}, lambda w: w[FC].fill_(torch.nan)),
]


@pytest.mark.usefixtures("no_templates")
def test_planted_faults(healthy: Measurements, tmp_path: Path) -> None:
    for fault in FAULTS:
        copied = tmp_path / fault.name
        shutil.copytree(fault.folder, copied)
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**config, **fault.config}))
        weights = load_file(copied / "model.safetensors")
        fault.edit(weights)
        save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
        found = the_problem(with_drafter(healthy, loaded(healthy, copied)))
        assert found.check == fault.check, fault.name
        assert fault.step in str(found.step), fault.name


@pytest.mark.usefixtures("no_templates")
def test_head_with_the_vocabulary_of_the_target(healthy: Measurements) -> None:
    """It has no vocabulary map; one that is estimated is not kept."""
    target = healthy.model.target
    config = layer_config(target.model.config)
    torch.manual_seed(0)
    head = Eagle3Head(config, target.hidden_size, None, default_reads(len(target.layers)))
    assert the_problem(with_drafter(healthy, head)).check == "target"
    assert head.token_ids is None


@pytest.mark.usefixtures("no_templates")
def test_advice_fits_the_kind_of_head(healthy: Measurements) -> None:
    """Only EAGLE-3 heads have layer ids and a map; only others draft as many tokens as asked."""
    for folder, is_eagle3 in ((BUNDLED_EAGLE3, True), (BUNDLED_HEAD, False)):
        head = loaded(healthy, folder)
        if not is_eagle3:
            head.restrict_vocabulary(torch.arange(200))
        steps = {item.check: item.step for item in find_settings(head, healthy.model.target)}
        assert ("layer ids" in steps["hidden states"]) is is_eagle3
        assert ("d2t" in steps["vocabulary"]) is is_eagle3
    found = findings(with_drafter(healthy, head))["vocabulary"]
    assert found.level == "note"
    assert str(found.step).endswith("or a larger --draft-vocabulary")


def test_answers_end_at_stop_strings(healthy: Measurements) -> None:
    template = TokenizerTemplate(healthy.model.tokenizer)
    template.stop = (" has",)
    texts = [
        healthy.model.tokenizer.decode(answer.ids[answer.start :])
        for answer in healthy.answer(template, healthy.chats)
    ]
    assert any(text.endswith(" has") for text in texts)
    assert not any(" has" in text[:-1] for text in texts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_templates")
def test_head_of_another_target(healthy: Measurements) -> None:
    measured = with_drafter(healthy, loaded(healthy), permuted(healthy.model.model))
    question = [{"role": "user", "content": QUESTIONS[0]}]
    (answer,) = measured.answer(healthy.chat_template, [question])
    assert answer.ids.equal(healthy.short[0].ids)  # so the answers are this target's, too
    found = the_problem(measured)
    assert found.check == "target"
    assert "trained for this target" in str(found.step)


@pytest.mark.usefixtures("no_templates")
def test_repeated_answers_do_not_suggest_another_vocabulary(healthy: Measurements) -> None:
    """They repeat what the drafter gets wrong, as answers under another chat template do."""
    vicuna = FastChatTemplate("vicuna_v1.1")
    answers = measured_with(healthy.model, vicuna, GENERAL_QUESTIONS[:6]).short
    measured = with_drafter(healthy, loaded(healthy, BUNDLED_EAGLE3))
    measured.short = answers * 3
    assert findings(measured)["vocabulary"].level == "ok"


def test_wrong_template(healthy: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = healthy.model.tokenizer
    own, *others = candidate_templates(tokenizer)
    assert isinstance(own[1], TokenizerTemplate)
    (kept,) = [item for item in others if item[0].startswith("role tokens")]
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    assert encode_prompt(chat, tokenizer, kept[1]).equal(encode_prompt(chat, tokenizer, own[1]))
    monkeypatch.setattr(checks, "candidate_templates", lambda tokenizer: [kept])
    chatml = TurnTemplate("<|im_start|>{role}\n{content}<|im_end|>\n", start=tokenizer.bos_token)
    found = check_template(measured_with(healthy.model, chatml))
    assert found.level == "problem"
    assert "<|im_start|>, <|im_end|> not in the target's vocabulary" in found.evidence
    assert "'<|{role}|>{content}<|end|>'" in str(found.step)
    assert check_template(healthy).level == "ok"
    assert others[-1][2].startswith("remove the chat_template")
    picky = "{% for turn in messages %}{{ turn.content or raise_exception('empty') }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", picky)
    assert not unknown_markers(own[1], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert candidate_templates(tokenizer)[-1][2].startswith("do not pass --conv-template")


@pytest.mark.slow
@pytest.mark.usefixtures("no_templates")
def test_draft_model(healthy: Measurements) -> None:
    config = copy.deepcopy(healthy.model.model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    other = LlamaForCausalLM(config)
    other.load_state_dict(healthy.model.model.state_dict())
    assert the_problem(with_drafter(healthy, DraftModel(other))).check == "RoPE"


# -- further findings ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_templates")
def test_small_dtypes(healthy: Measurements) -> None:
    """They are compared with float32 and restored; infinite weights may be an overflow."""
    head = loaded(healthy).half()
    head.fc.weight.data[0, 0] = torch.inf
    found = the_problem(with_drafter(healthy, head))
    assert found.check == "dtype"
    assert found.evidence.endswith("are NaN or infinite, as are values of fc.weight")
    assert str(found.step).startswith("pass another --dtype, such as float32; if that does")
    for folder in (BUNDLED_HEAD, BUNDLED_DRAFT_MODEL):
        drafter = loaded(healthy, folder)
        network = drafter.network.bfloat16()
        before = [(item.dtype, item.data_ptr()) for item in network.parameters()]
        found = findings(with_drafter(healthy, drafter))["dtype"]
        assert found.level == "ok"
        assert found.evidence.startswith("bfloat16; target float32; agreement ")
        assert found.evidence.endswith(" with float32")
        assert [(item.dtype, item.data_ptr()) for item in network.parameters()] == before


def text_of(answers: Sequence[MeasuredAnswer]) -> list[tuple[Tensor, Tensor]]:
    return [(item.ids, torch.arange(len(item.ids)) >= item.start) for item in answers]


def test_training_text(healthy: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    target = healthy.model.target
    own = check_training_text(target, text_of(healthy.short))
    assert own.level == "ok"
    assert own.evidence.startswith("100.0% of ")
    # Half of the text of another writer.
    generator = torch.Generator().manual_seed(0)
    foreign = [replace(a, ids=a.ids.clone()) for a in healthy.short]
    for answer in foreign:
        places = torch.arange(answer.start, len(answer.ids), 4)
        answer.ids[places] = torch.randint(3, 1024, places.shape, generator=generator).to(
            answer.ids
        )
    found = check_training_text(target, text_of(foreign))
    assert found.level == "note"
    assert "eagle-fsd train regenerate" in str(found.step)
    # Beyond the context, tokens say nothing.
    (ids, mask), text = text_of(foreign)[0], text_of(healthy.short)
    with monkeypatch.context() as patch:
        patch.setattr(target, "stable_length", len(text[0][0]))
        longer = torch.cat([text[0][0], ids]), torch.cat([text[0][1], mask])
        assert check_training_text(target, [longer]) == check_training_text(target, text[:1])
    empty = check_training_text(
        target, [(torch.tensor([1, 2, 3]), torch.tensor([True, False, False]))]
    )
    assert (empty.level, empty.evidence) == ("note", "no answer tokens")


def test_depth_context_length_and_tree(healthy: Measurements) -> None:
    """Each of these checks needs only one table of the measurements."""

    def check(checks: Callable[[Any], Finding], **tables: Any) -> Finding:
        pair = SimpleNamespace(drafter=healthy.model.drafter, tree=TreeConfig(depth=4))
        return checks(SimpleNamespace(model=pair, **tables))

    for divergences, messages in ((torch.full((60,), 0.58), 1), (torch.tensor([0.01, 0.5]), 0)):
        acceptance = AcceptanceConfig(threshold=0.2)
        pair = SimpleNamespace(acceptance=acceptance)
        gate: Any = SimpleNamespace(model=pair, divergences=divergences)
        found = checks.check_gate(gate)
        assert len(found) == messages
        assert all("its median is 0.58" in item.evidence for item in found)

    def rows(*shares: float) -> list[dict[str, Any]]:
        pairs = zip((200, 100, 66), shares, strict=False)
        return [{"steps": steps, "accepted": share} for steps, share in pairs]

    assert check(check_depth, by_depth=rows(0.8, 0.7, 0.5)) == Finding(
        "depth",
        "note",
        "accepted 80.0% at depth 1, 50.0% from depth 3 on",
        "train the head on its own outputs: eagle-fsd train --unroll 3",
    )
    eagle3: Any = SimpleNamespace(model=SimpleNamespace(drafter=None), by_depth=rows(0.8, 0.7, 0.5))
    assert str(check_depth(eagle3).step).endswith("--unroll 7")
    for shares in ((0.8, 0.7, 0.7), (0.8, 0.7)):
        assert check(check_depth, by_depth=rows(*shares)).level == "ok"

    for share, tokens, level in ((0.4, 128, "note"), (0.85, 128, "ok"), (0.7, 50, "ok")):
        short = {"first": 0, "last": 127, "tokens": 128, "agreement": 0.9}
        long = {"first": 128, "last": 255, "tokens": tokens, "agreement": share}
        found = check(check_length, by_length=[short, long])
        assert found.level == level
        assert found.evidence == f"agreement 90.0% at 0-127 tokens, {share:.1%} at 128-255 tokens"
    found = check(check_length, by_length=[short, {**long, "tokens": 49}])
    assert found.evidence == "fewer than two ranges of context lengths have 50 answer tokens"

    def answers(*accepted: int) -> list[MeasuredAnswer]:
        return [MeasuredAnswer(torch.arange(9), 1, [*accepted, 1])]

    assert check(check_tree, short=answers(6, 6, 3, 1)) == Finding(
        "tree",
        "note",
        "50% of the steps accept the longest path, 5 tokens",
        "try trees deeper than --depth 4",
    )
    assert check(check_tree, short=answers(6, 3, 3, 1)).level == "ok"


# -- the whole diagnosis and the command ---------------------------------------------------------


def test_drafter_without_a_network_gets_tables(run: Run, tmp_path: Path) -> None:
    """Chats that the template rejects are skipped."""
    small = ("--prompts", "bundled", "--count", 2, "--max-new-tokens", 16, "--drafter", "ngram")
    data = tmp_path / "chats.jsonl"
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "tool", "assistant")]
    data.write_text(json.dumps({"messages": chat}))
    status, out, _ = run("doctor", *small, "--target", BUNDLED_TARGET, "--data", data)
    assert status == 0
    assert out.startswith("NGramDrafter: tau ")
    assert out.splitlines()[-1].startswith(("Nothing to repair.", "Next step: "))
    status, _, errors = run("doctor", *small, "--data", tmp_path / "missing")
    assert (status, "--data must be an existing file" in errors) == (2, True)
    found = json.loads(run("doctor", *small, "--json")[1])
    assert found["healthy"]
    assert found["agreement"] is None
    assert {finding["check"] for finding in found["findings"]} <= {"speed", "tree"}
    assert found["tau"] >= 1.0
    assert sum(row["steps"] for row in found["by_length"]) > 4
    assert all(row["agreement"] is None for row in found["by_length"])
    assert found["by_depth"] == []


def test_only_levels_are_colored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"highlight": False, "markup": False, "soft_wrap": True}
    colored = Console(force_terminal=True, color_system="standard", **options)
    monkeypatch.setattr("eagle_fsd.cli.doctor.out", colored)
    small = ("--prompts", "bundled", "--count", 1, "--max-new-tokens", 8, "--drafter", "ngram")
    _, out, _ = run("doctor", *small, "--target", BUNDLED_TARGET)
    colors = re.findall(r"^\x1b\[(.+?)m(\w+) +\x1b\[0m\w[^\x1b]+$", out, re.MULTILINE)
    assert colors
    assert set(colors) <= {("32", "ok"), ("33", "note"), ("1;31", "problem")}


def test_the_tree_is_that_of_exact_decoding(healthy: Measurements) -> None:
    old = healthy.model
    model = EagleFSD(old.model, NGramDrafter(), old.tree, tokenizer=old.tokenizer)
    model.exact_tree = TreeConfig(total_tokens=4, depth=2, top_k=1)
    found = diagnose(model, QUESTIONS[:1], healthy.chat_template, max_new_tokens=8)
    assert found["tree"] == model.exact_tree.model_dump()
    assert found["findings"][-1]["evidence"].endswith("accept the longest path, 3 tokens")


def test_questions_must_fit_the_context(healthy: Measurements) -> None:
    long = "apples " * 3000
    with pytest.raises(ValueError, match="no question leaves room for an answer"):
        _ = measured_with(healthy.model, questions=[long]).short
    measured = measured_with(healthy.model, questions=[long, QUESTIONS[0]])
    assert len(measured.short) == len(measured.chains) == 1


@pytest.mark.slow
def test_command_advises_against_a_wrong_template(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    written = islice(chats("train", seed=5), 20)
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in written))
    small = ("--prompts", "bundled", "--count", 6, "--max-new-tokens", NEW_TOKENS, "--data", data)
    status, out, _ = run("doctor", "--json", *small, "--conv-template", "vicuna_v1.1")
    found = json.loads(out)
    assert (status, found["healthy"]) == (1, False)
    assert found["next_step"] == "do not pass --conv-template"
    checks = {finding["check"] for finding in found["findings"]}
    assert {"chat template", "training text", "context length", "depth", "tree"} <= checks


@pytest.mark.slow
def test_sample_in_the_documentation(run: Run) -> None:
    status, out, _ = run("doctor")
    assert status == 0
    assert f"```\n{out}```" in PAGE.read_text()
