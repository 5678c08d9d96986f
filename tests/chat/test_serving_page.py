"""The pages on the API and on deployment agree with the servers."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from eagle_fsd.chat.serve.body import Body
from eagle_fsd.chat.serve.metrics import ServerMetrics
from eagle_fsd.chat.serve.openai_format import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from eagle_fsd.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
API, DEPLOYMENT = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("api.md", "deployment.md")
)
#: For each column of the table: the request, OpenAI's parameters, and a valid body.
COLUMNS: tuple[tuple[type[Body], Any, dict[str, Any]], ...] = (
    (
        ChatRequest,
        chat_create_params.CompletionCreateParamsBase,
        {"model": "pair", "messages": [{"role": "user", "content": "Hello!"}]},
    ),
    (
        CompletionRequest,
        completion_create_params.CompletionCreateParamsBase,
        {"model": "pair", "prompt": "Hello!"},
    ),
    (
        EmbeddingRequest,
        embedding_create_params.EmbeddingCreateParams,
        {"model": "pair", "input": "Hello!"},
    ),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DEPLOYMENT, re.MULTILINE | re.DOTALL)


def parameters(model: type[Body]) -> set[str]:
    """Return the names of a request's parameters."""
    names = set()
    for name, field in model.model_fields.items():
        alias: Any = field.validation_alias
        names.update([name] if alias is None else getattr(alias, "choices", [alias]))
    return names


@pytest.mark.parametrize("column", range(3), ids=["chat", "completions", "embeddings"])
def test_table_of_parameters(column: int) -> None:
    """It has all parameters of OpenAI's client and all of ours, and says which are accepted."""
    lines = API[API.index("| parameter |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells = {name: row[1 + column] for row in rows for name in re.findall("`(.+?)`", row[0])}
    model, openais, valid = COLUMNS[column]
    assert {*openais.__annotations__, *parameters(model)} <= cells.keys()
    for name, cell in cells.items():
        if cell in ("", "no"):  # empty: OpenAI's route does not have it either
            assert name not in parameters(model)
            assert bool(cell) == (name in openais.__annotations__)
        elif cell == "yes":
            assert name in parameters(model)
        else:
            assert cell.startswith("only ")
            for value in re.findall("`(.+?)`", cell):
                model.model_validate({**valid, name: json.loads(value)})
            with pytest.raises(ValueError, match=name):
                model.model_validate({**valid, name: "another value"})


def test_configuration_files() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(blocks("ini")[0])
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/bin/eagle-fsd")
    commands = [arguments]
    compose, prometheus, alerts = map(yaml.safe_load, blocks("yaml"))
    commands += [["serve", *shlex.split(item["command"])] for item in compose["services"].values()]
    for command in commands:
        app.parse_args(command, exit_on_error=False, print_error=False)
        # Without it, the server rejects what the reverse proxies pass on.
        assert command[command.index("--trusted-hosts") + 1] == "chat.example.com"
    (job,) = prometheus["scrape_configs"]
    (rule,) = alerts["groups"][0]["rules"]
    assert f'up{{job="{job["job_name"]}"}}' in rule["expr"]


def test_metrics_exist() -> None:
    metrics = ServerMetrics()
    metrics.requests.labels("failed").inc()
    metrics.tokens.labels("exact").inc()
    exposed = metrics.page(0, 0, 1).decode()
    for name in set(re.findall(r"eagle_fsd_\w+", API + DEPLOYMENT)):
        assert re.search(rf"^# TYPE {name} ", exposed, re.MULTILINE), name
