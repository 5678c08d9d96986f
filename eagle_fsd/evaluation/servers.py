"""Compare OpenAI-compatible servers: a server is a method whose answers come from elsewhere."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import NO_TURN, Record
from eagle_fsd.evaluation.answering import Answerer, Conversation, Turn
from eagle_fsd.evaluation.certificate import (
    certificate_of,
    check_sampling,
    check_scores,
    count_unscored_as_wrong,
    is_certified,
    warn_of_few,
)
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, ServerOptions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.report import limit_losses
from eagle_fsd.evaluation.runner import (
    Evaluation,
    Hooks,
    Report,
    checked_questions,
    conduct,
    ignore,
)
from eagle_fsd.evaluation.tables import Row, points_text
from eagle_fsd.evaluation.verdict import comparison_text
from eagle_fsd.model.config import PairOptions, read_settings
from eagle_fsd.utils.chat_api import (
    ChatClient,
    Endpoint,
    EndpointError,
    find_model,
    map_concurrently,
)
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Seconds to wait for an answer.
TIMEOUT = 600


class ServerError(ValueError):
    """A request to a server failed; the message names the server."""


@dataclass(frozen=True)
class ComparedServer:
    """A server to compare, under the name that it has in tables and files."""

    name: str
    client: ChatClient
    owner: str  # of the model, as the server states it

    @classmethod
    def find(cls, argument: str, model: str | None) -> ComparedServer:
        """Connect to the server given as ``NAME=URL``, and choose a model that it lists."""
        name, _, url = argument.partition("=")
        try:
            endpoint, owner = find_model(url, model)
        except EndpointError as error:
            url = Endpoint(url, "").redacted_url
            raise ServerError(f"server {name} at {url}: {error}") from error
        return cls(name, ChatClient(replace(endpoint, timeout=TIMEOUT)), owner)


class ServerAnswerer(Answerer[ComparedServer]):
    """Let servers answer questions, ``config.batch`` at once."""

    def warm_up(self, questions: Sequence[Question], method: ComparedServer) -> None:
        """See :meth:`Answerer.warm_up`; raises ServerError if the server fails."""
        for _ in self._converse(self.conversations(questions, 1), method):
            pass

    def answer(
        self, questions: Sequence[Question], method: ComparedServer, group: int = 0
    ) -> Iterator[Record]:
        """See :meth:`Answerer.answer`.

        If the server fails or the run is interrupted, the records of questions with complete
        answers are yielded before the exception is raised.
        """
        answers = self.conversations(questions, self.config.answers)
        begin, seconds = time.perf_counter(), 0.0
        failure: BaseException | None = None
        try:
            for _ in self._converse(answers, method):
                seconds = time.perf_counter() - begin
        except (ServerError, KeyboardInterrupt) as error:
            failure = error
        incomplete = {
            item.question.question_id
            for item in answers
            if len(item.turns) < len(item.question.turns)
        }
        kept = [item for item in answers if item.question.question_id not in incomplete]
        yield from self.records(kept, method.name, group, seconds=seconds)
        if failure is not None:
            raise failure

    def _converse(
        self, answers: Sequence[Conversation], method: ComparedServer
    ) -> Iterator[Conversation]:
        """Answer all turns of conversations, and yield each one that is complete."""

        def finish(answer: Conversation) -> None:
            while answer.ask():
                answer.answer(self._turn(answer, method))

        try:
            with closing(map_concurrently(finish, answers, self.config.batch)) as found:
                for answer, _ in found:
                    yield answer
        except EndpointError as error:
            url, folder = method.client.endpoint.redacted_url, self.session.folder
            raise ServerError(
                f"server {method.name} at {url} failed ({error}); the answers so far are in"
                f" {folder}: run the same command again to resume"
            ) from error

    def _turn(self, answer: Conversation, method: ComparedServer) -> Turn:
        """Request the next turn; a prompt that does not fit the context gives one with an error."""
        sampling = self.config.sampling(seed=self.seed(answer)).model_dump()
        standard = {name: sampling[name] for name in ("temperature", "top_p", "seed")}
        # Servers that do not know these parameters would reject them.
        extra = {name: sampling[name] for name in ("top_k", "min_p") if sampling[name]}
        begin = time.perf_counter()
        try:
            text, complete, tokens = method.client.answer(
                answer.chat, max_tokens=self.config.max_new_tokens, extra_body=extra, **standard
            )
        except EndpointError as error:
            if error.status == 400 and "context" in str(error):
                return {**NO_TURN, "errors": str(error)}
            raise
        return {
            **NO_TURN,
            "turns": text.strip(),
            "idxs": None,
            "new_tokens": tokens,
            "latency": time.perf_counter() - begin,
            "cut_off": not complete,
        }


class ServerEvaluation(Evaluation):
    """An evaluation of servers, the first of which is the reference."""

    def __init__(
        self,
        servers: Sequence[ComparedServer],
        questions: Sequence[Question],
        request: EvaluationRequest,
        config: EvaluationConfig,
        folder: Path,
    ) -> None:
        listed = [f"{item.name}={item.client.endpoint.redacted_url}" for item in servers]
        source = {"target": servers[0].client.endpoint.model, "drafter": None, "servers": listed}
        names = [item.name for item in servers]
        super().__init__(names, questions, request, config, folder=folder, source=source)
        self.servers = {item.name: item for item in servers}
        self.reference = servers[0].name
        self.provenance |= {"dtype": "unknown", "device": "servers", "servers": listed}

    def describe(self, name: str, rows: int = 1) -> dict[str, Any]:
        """See :meth:`Evaluation.describe`; a server may have moved when a run is resumed."""
        server = self.servers[name]
        return {"method": "server", "model": server.client.endpoint.model, "engine": server.owner}

    def write(self, report: Report) -> None:
        """Compare the servers by what the report has so far; see :meth:`Evaluation.write`."""
        if "reference" in report:
            others = (row for row in report["rows"] if row["method"] != self.reference)
            report["conclusions"] = [comparison_text(report, row) for row in others]
            if "certified" in report:
                report["conclusions"].append(report["certified"])
        super().write(report)

    def answerer(self, **shared: Any) -> ServerAnswerer:
        """Return what answers the questions, and warn about answers of an earlier run."""
        for name, store in self.stores.items():
            if store.records:
                log.warning(
                    "%d answers of server %s are from an earlier run: its settings must be the"
                    " same",
                    len(store.records),
                    name,
                )
        return ServerAnswerer(methods=list(self.servers.values()), **shared)


def evaluate_servers(
    request: EvaluationRequest,
    options: ServerOptions,
    config: EvaluationConfig | None = None,
    *,
    progress: ProgressFactory = no_progress,
    on_report: Callable[[Report], None] | None = None,
) -> Report | None:
    """Compare servers on the same questions: speed, quality, and a bound on the loss.

    Answers and report are written to the request's output folder, from which a run that was
    interrupted, or whose server failed, resumes. The bound holds at ``options.confidence`` for all
    servers at once. A certificate requires questions that had no part in selecting the settings.
    """
    config, folder = config or EvaluationConfig(), request.output_folder("servers")
    changed = request.model_dump(exclude_defaults=True)
    if given := changed.keys() & {*PairOptions.model_fields, "baseline", "assistant"}:
        option = min(given).replace("chat_template", "conv-template").replace("_", "-")
        raise OptionsError(f"--server compares servers, which --{option} does not affect")
    questions = checked_questions(request, config, progress)
    if options.certify is not None:
        check_sampling(config)
        read_settings(options.certify)  # before hours of requests
        questions = list(map(count_unscored_as_wrong, questions))
        check_scores(questions, request.execute_code)
        if warning := warn_of_few(options, questions):
            log.warning("%s", warning)
    servers = [ComparedServer.find(item, options.server_model) for item in options.servers]
    evaluation = ServerEvaluation(servers, questions, request, config, folder=folder)

    def extend(report: Report) -> None:
        report["reference"] = evaluation.reference
        report |= limit_losses(report["rows"], confidence=options.confidence)
        if options.certify is not None:
            row = next(row for row in report["rows"] if row["method"] != evaluation.reference)
            report["certified"] = certify(report, options, row)

    hooks = Hooks(progress, on_report=extend, on_finish=on_report or ignore)
    return conduct(evaluation, request, hooks)


def certify(report: Report, options: ServerOptions, row: Row) -> str:
    """Write a certificate if the bound on a server's loss is small enough; return the outcome."""
    assert options.certify is not None
    if not is_certified(row, options):
        limit = points_text(row["against_exact"]["loss_limit"])
        return (
            f"Not certified: the loss is at most {limit} points, and"
            f" --max-drop is {options.max_drop:g}."
        )
    decoder = options.engine or row["settings"]["engine"] or "unknown"
    certificate = certificate_of(report, row, decoder)
    values = json.loads(options.certify.read_text(encoding="utf-8"))
    values["certificate"] = certificate.model_dump()
    atomic_write(options.certify, json.dumps(values, indent=2) + "\n")
    return f"Certified in {options.certify}: {certificate}."
