"""Shared code of the benchmarks: options, timed steps and answers, a step's floor, and reports.

Three ways to decode are compared: plain decoding, exact verification of draft trees, and FSD. Their
calls advance in turn, a few steps at a time, so that changes of the machine's speed affect all of
them alike; a step's time is the median over these blocks.

*Forced acceptance* (:class:`ForcedAcceptance`) accepts a fixed number of drafted tokens in every
step, so that models with random weights can be timed. It exists only here and only in
:func:`time_steps`, which discards the tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import scipy.stats
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled.problems import Message, problems
from eagle_fsd.evaluation.tables import markdown
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.generation import Generation
from eagle_fsd.model.verify import AcceptanceRule, VerificationInputs
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.provenance import describe_environment

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
PLAIN, EXACT, FSD = "plain", "exact", "FSD"
#: FSD's options where a pair brings none.
FSD_ACCEPTANCE = AcceptanceConfig(threshold=0.05, min_ratio=0.3)
#: Phases of a step in tables; all others are summed up as "rest".
SHOWN_PHASES = ("draft", "target", "verify")


# -- options -----------------------------------------------------------------------------------


def new_parser(description: str, compiles: bool = True) -> argparse.ArgumentParser:
    """Create a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda; default: %(default)s")
    parser.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; default: 1")
    parser.set_defaults(compile=False)
    if compiles:
        parser.add_argument(
            "--compile", action="store_true", help="compile the passes of drafter and target"
        )
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **fixed: object
) -> argparse.Namespace:
    """Parse options, set the number of threads, and silence transformers.

    ``fixed`` are options for which a script supports one value only. Returns the options;
    ``dtype`` is a ``torch.dtype``.
    """
    parser.set_defaults(**fixed)
    options = parser.parse_args(arguments)
    for name, value in fixed.items():
        if getattr(options, name) != value:
            parser.error(f"--{name} must be {value}; got {getattr(options, name)}")
    # Intervals and quantiles take two answers, a selection takes one.
    for name, least in (("count", 2), ("trial", 1)):
        if (number := vars(options).get(name, least)) < least:
            parser.error(f"--{name} must be at least {least}; got {number}")
    name = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.dtype = getattr(torch, name, None)
    if not isinstance(options.dtype, torch.dtype):
        parser.error(f"--dtype must name a data type of torch; got {name}")
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return options


def parse_tree(text: str) -> TreeConfig:
    """Parse ``total_tokens/depth/top_k``, such as ``60/6/10``."""
    total_tokens, depth, top_k = map(int, text.split("/"))
    return TreeConfig(total_tokens=total_tokens, depth=depth, top_k=top_k)


def progress(items: Iterable[T], label: str) -> Iterable[T]:
    """Iterate with a progress bar on standard error."""
    return tqdm(list(items), desc=label, file=sys.stderr, leave=False)


# -- timed steps -------------------------------------------------------------------------------


class ForcedAcceptance(AcceptanceRule):
    """Accept the drafted tokens of the first levels of every tree, whatever the target says.

    The wrapped rule's gate is evaluated, but ignored. A step emits ``count + 1`` tokens if its tree
    is deep enough. The output is meaningless, so a call with this rule fails unless
    :func:`time_steps` makes it.
    """

    def __init__(self, count: int, rule: AcceptanceRule) -> None:
        self.count, self.rule = count, rule
        self.timing = False

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        if not self.timing:
            raise RuntimeError("forced acceptance is for timing only and returns no text")
        return super().start(prompts)

    def gate(self, inputs: VerificationInputs) -> Tensor:
        return self.rule.gate(inputs)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        return self.rule.admits(inputs, nodes, tokens)

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        # Depends on `accepted` formally, so that a compiler does not drop the wrapped rule.
        return (inputs.tree.depths <= self.count) & (accepted | torch.ones_like(accepted))


@dataclass(frozen=True)
class Contender:
    """A way to decode greedily.

    ``acceptance``: Acceptance options, which also select the pair's tree; None for plain decoding.
    """

    name: str
    model: EagleFSD
    acceptance: AcceptanceConfig | None = None

    @property
    def tree(self) -> TreeConfig | None:
        """The tree; None for plain decoding."""
        return None if self.acceptance is None else self.model.tree_for(self.acceptance)

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of :meth:`EagleFSD.generate`."""
        if self.acceptance is None:
            return {"method": "ar"}
        return {"acceptance": self.acceptance}


def contenders(model: EagleFSD) -> list[Contender]:
    """Return plain decoding, exact verification and FSD with the same models."""
    fsd = FSD_ACCEPTANCE if model.acceptance.lossless else model.acceptance
    return [
        Contender(PLAIN, model),
        Contender(EXACT, model, AcceptanceConfig()),
        Contender(FSD, model, fsd),
    ]


@dataclass(frozen=True)
class Timing:
    """The numbers of steps to time."""

    warm_up: int = 8
    block: int = 4
    blocks: int = 8

    @property
    def steps(self) -> int:
        """Steps of each call."""
        return self.warm_up + self.block * self.blocks


#: The timing with ``--quick``.
QUICK = Timing(1, 1, 2)


@dataclass
class StepTimes:
    """Times of one contender's steps.

    ``blocks``: Seconds per step of each block. ``phases``: Seconds per step by phase; empty if the
    steps were replayed as CUDA graphs, which have no phases, until :func:`add_phases` has measured
    them. ``phased``: Seconds of a step that was divided into these phases. ``captured``: Whether
    the steps were replayed. ``tau``: Tokens emitted per row and step.
    """

    blocks: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    phased: float = 0.0
    captured: bool = False
    tau: float = 0.0

    @property
    def seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.blocks)


def time_steps(
    ways: Sequence[Contender],
    ids: Tensor,
    timing: Timing,
    label: str,
    accepted: int | None = None,
) -> dict[str, StepTimes]:
    """Time decoding steps of several contenders in turn. The tokens are discarded.

    Rows do not end at end-of-sequence tokens.

    ``ids``: ``[B, S]`` the prompts, on the target's device. ``accepted``: Drafted tokens that
    every step is forced to accept; default: no force. Returns the times by the contender's name.
    """
    times = {way.name: StepTimes() for way in ways}
    with ExitStack() as stack:
        calls = {}
        for way in ways:
            call = stack.enter_context(_start(way, ids, timing, accepted))
            _advance(call, len(ids) * timing.warm_up)
            calls[way.name] = call
        before = {
            name: (dict(call.stats.seconds), call.stats.tokens) for name, call in calls.items()
        }
        for _ in progress(range(timing.blocks), label):
            for name, call in calls.items():
                seconds = _advance(call, len(ids) * timing.block)
                times[name].blocks.append(seconds / timing.block)
        steps = timing.block * timing.blocks
        for name, call in calls.items():
            earlier, tokens = before[name]
            times[name].tau = (call.stats.tokens - tokens) / (steps * len(ids))
            phases = {
                phase: (seconds - earlier.get(phase, 0.0)) / steps
                for phase, seconds in call.stats.seconds.items()
                if phase != "prefill"
            }
            divided = sum(phases[phase] for phase in SHOWN_PHASES)
            times[name].captured = phases.pop("graph", 0.0) > divided
            if not times[name].captured:
                mean = statistics.fmean(times[name].blocks)  # as the phases
                times[name].phases, times[name].phased = phases, mean
    return times


def add_phases(
    times: Mapping[str, StepTimes],
    ways: Sequence[Contender],
    ids: Tensor,
    timing: Timing,
    label: str,
    accepted: int | None = None,
) -> None:
    """Time steps that were replayed as CUDA graphs once more, without graphs, for their phases."""
    eager = []
    for way in ways:
        if times[way.name].captured:
            model = copy.copy(way.model)
            model.capture = False
            eager.append(replace(way, model=model))
    for name, found in time_steps(
        eager, ids, timing, label=f"{label}, phases", accepted=accepted
    ).items():
        times[name].phases, times[name].phased = found.phases, found.phased


@contextmanager
def _start(
    contender: Contender, ids: Tensor, timing: Timing, accepted: int | None
) -> Iterator[Generation]:
    """Start a call that can take all steps."""
    options, longest, model = contender.options(), 1, contender.model
    if contender.acceptance is not None:
        assert contender.tree is not None
        longest = contender.tree.depth + 2
        if accepted is not None:
            longest = accepted + 1
            rule = ForcedAcceptance(accepted, rule_for(contender.acceptance))
            rule.timing = True
            # The wrapped rule has the limits already. With a rule, calls use the attribute `tree`.
            unlimited = contender.acceptance.overridden({"max_fuzzy_nats": None, "exact_first": 0})
            options |= {"rule": rule, "acceptance": unlimited}
            model = copy.copy(model)
            model.tree = contender.tree
    # One step more, so that no row ends in a timed one.
    new_tokens = longest * (timing.steps + 1)
    with model.stream(ids, torch.ones_like(ids), new_tokens, eos_token_id=[], **options) as call:
        yield call


def _advance(call: Generation, chunks: int) -> float:
    """Decode the next ``chunks`` chunks, one per row and step; return the seconds."""
    synchronize()
    begin = time.perf_counter()
    iterator = iter(call)
    for _ in range(chunks):
        if next(iterator).finished:
            raise RuntimeError("a row ended: the context is too short for the timed steps")
    synchronize()
    return time.perf_counter() - begin


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_prompt(model: EagleFSD, rows: int, length: int) -> Tensor:
    """Draw prompts.

    Returns ``[B, S]`` token ids on the target's device.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.target.vocab_size, (rows, length), generator=generator)
    return ids.to(model.target.device)


# -- answers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The token ids of a prompt, and the right result."""

    ids: list[int]
    final: int

    def is_solved(self, text: str) -> bool:
        """Return whether an answer ends with the result."""
        return text.rpartition("####")[2].strip() == str(self.final)


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Encode a chat up to the answer."""
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def word_problems(tokenizer: Any, count: int) -> list[Task]:
    """Return the first word problems that the bundled target was not trained on."""
    return [
        Task(prompt_ids(tokenizer, [{"role": "user", "content": item.question}]), item.final)
        for item in problems("test", count)
    ]


@dataclass(frozen=True)
class Answer:
    """The new tokens of an answer, the passes of the target (0: unknown), and the seconds."""

    tokens: list[int]
    passes: int
    seconds: float


@dataclass
class Method:
    """A way to answer prompts of token ids, and its answers."""

    name: str
    setting: str
    generate: Callable[[list[int]], Answer]
    answers: list[Answer] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each answer."""
        return [len(answer.tokens) / answer.seconds for answer in self.answers]

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all answers."""
        return self.tokens / sum(answer.seconds for answer in self.answers)

    @property
    def tau(self) -> float:
        """Tokens per pass of the target."""
        return self.tokens / sum(answer.passes for answer in self.answers)

    def identical(self, other: Method) -> float:
        """Return the percentage of answers that equal another method's."""
        pairs = zip(self.answers, other.answers, strict=True)
        return 100 * statistics.fmean(one.tokens == two.tokens for one, two in pairs)

    def accuracy(self, tasks: Sequence[Task], tokenizer: Any) -> float:
        """Return the percentage of right answers."""
        pairs = zip(self.answers, tasks, strict=True)
        return 100 * statistics.fmean(
            task.is_solved(tokenizer.decode(answer.tokens, skip_special_tokens=True))
            for answer, task in pairs
        )


def timed(
    generate: Callable[[Tensor], tuple[Tensor, int]], device: torch.device
) -> Callable[[list[int]], Answer]:
    """Time a function from a prompt ``[1, S]`` to ``[1, S + new]`` and the passes of the target."""

    def answer(ids: list[int]) -> Answer:
        prompt = torch.tensor([ids], device=device)
        synchronize()
        begin = time.perf_counter()
        sequences, passes = generate(prompt)
        synchronize()
        seconds = time.perf_counter() - begin
        return Answer(sequences[0, len(ids) :].tolist(), passes, seconds)

    return answer


def pair_method(
    name: str,
    contender: Contender,
    tree: TreeConfig | None,
    new_tokens: int,
    compiled: bool = False,
) -> Method:
    """Return a contender as a method with a tree."""
    pair, options = copy.copy(contender.model), contender.options()
    pair.compile = compiled
    if tree is not None:
        pair.tree = tree

    def generate(ids: Tensor) -> tuple[Tensor, int]:
        out = pair.generate(ids, torch.ones_like(ids), new_tokens, **options)
        return out.sequences, sum(map(len, out.stats.accepted))

    setting = "" if tree is None else tree.shape
    return Method(name, setting, timed(generate, pair.target.device))


def answer_in_turn(
    methods: Sequence[Method],
    tasks: Sequence[Task],
    label: str,
    after: Callable[[int], None] = lambda _: None,
    warm_up: Task | None = None,
) -> None:
    """Answer all tasks with each method in turn, after an uncounted answer to ``warm_up``.

    That is by default the first task. ``after`` is called with the number of tasks that count so
    far.
    """
    for method in methods:
        method.answers = []
    for counted, task in enumerate(progress([warm_up or tasks[0], *tasks], label)):
        for method in methods:
            answer = method.generate(task.ids)
            if counted:
                method.answers.append(answer)
        after(counted)


def fastest(methods: Iterable[Method]) -> dict[str, Method]:
    """Return the method with the highest mean speed of each name."""
    best: dict[str, tuple[float, Method]] = {}
    for method in methods:
        speed = statistics.geometric_mean(method.speeds)
        if method.name not in best or speed > best[method.name][0]:
            best[method.name] = speed, method
    return {name: method for name, (_, method) in best.items()}


def mean_ratio(name: str, above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Return the geometric mean of ratios by its name, and its 95% interval."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    error *= float(scipy.stats.t.ppf(0.975, len(logs) - 1))
    interval = [math.exp(mean - error), math.exp(mean + error)]
    return {name: math.exp(mean), f"{name}_interval": interval}


def best_times(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run functions in turn, several times; return the shortest time of each in seconds."""
    best = dict.fromkeys(functions, math.inf)
    for _ in progress(range(repeats), "repeats"):
        for name, run in functions.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# -- the floor ---------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device, quick: bool = False) -> float:
    """Measure the bytes per second, read and written, of a large copy on a device."""
    size = (1 << 22) if quick else (1 << 28 if device.type == "cpu" else 1 << 31)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(3 if quick else 12):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * size / statistics.median(times[2:])


def step_bytes(contender: Contender, context: int, rows: int = 1) -> int:
    """Count the bytes that a step must read at least.

    These are the weights of the target, and for each of the ``depth + 1`` passes of the draft head
    its weights and its output projection, plus the keys and values of the context in every pass.
    Of the input embedding, only a few rows are read.
    """
    model = contender.model
    target, head = model.target, model.drafter
    projection = target.lm_head.weight
    weights = _weight_bytes(model.model, skip=target.embed.weight)
    if target.embed.weight is projection:  # tied: read as the output projection
        weights += projection.nbytes
    total = weights + rows * context * _cache_bytes(target.config, target.dtype)
    if contender.tree is None:
        return total
    assert isinstance(head, DraftHead)
    skip = None if head.embed_tokens is None else head.embed_tokens.weight
    per_pass = _weight_bytes(head, skip)
    if head.projects:
        per_pass += head.vocab_size * projection.shape[1] * projection.element_size()
    layers = len(head.layers)
    per_pass += rows * context * _cache_bytes(head.config, head.dtype, layers)
    return total + (contender.tree.depth + 1) * per_pass


def _weight_bytes(module: torch.nn.Module, skip: Tensor | None) -> int:
    return sum(weight.nbytes for weight in module.parameters() if weight is not skip)


def _cache_bytes(config: Any, dtype: torch.dtype, layers: int | None = None) -> int:
    """Return the bytes of one token's keys and values."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * (layers or config.num_hidden_layers) * groups * size * dtype.itemsize


def step_rows(
    ways: Sequence[Contender],
    times: Mapping[str, StepTimes],
    context: int,
    rows: int,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """Summarize the steps of contenders, among which is plain decoding.

    Returns milliseconds by phase and of the floor; ``speedup`` is relative to plain decoding.
    Phases that have not been measured are None. ``phased_ms`` is the step that was divided into
    phases.
    """
    found = []
    plain = times[PLAIN].tau / times[PLAIN].seconds
    for way in ways:
        steps = times[way.name]
        floor = step_bytes(way, context, rows) / bandwidth
        phases: dict[str, float | None] = dict.fromkeys((*SHOWN_PHASES, "rest"))
        if steps.phases:
            shown = {phase: 1e3 * steps.phases.get(phase, 0.0) for phase in SHOWN_PHASES}
            phases = {**shown, "rest": max(0.0, 1e3 * steps.phased - sum(shown.values()))}
        speed = steps.tau / steps.seconds
        found.append(
            {
                "method": way.name,
                "tree": "" if way.tree is None else way.tree.shape,
                "tau": steps.tau,
                "step_ms": 1e3 * steps.seconds,
                **{f"{phase}_ms": value for phase, value in phases.items()},
                "phased_ms": 1e3 * steps.phased,
                "captured": steps.captured,
                "phases_ms": {phase: 1e3 * value for phase, value in steps.phases.items()},
                "floor_ms": 1e3 * floor,
                "over_floor": steps.seconds / floor,
                "tokens_per_second": rows * speed,
                "speedup": speed / plain,
                "blocks_ms": [1e3 * value for value in steps.blocks],
            }
        )
    return found


# -- reports -----------------------------------------------------------------------------------


@dataclass
class Table:
    """Results with the same columns."""

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Any]]
    note: str = ""

    def markdown(self) -> str:
        """Format the table with its title and note."""
        cells = [[_cell(row[key]) for key in self.columns] for row in self.rows]
        table = markdown(list(self.columns.values()), cells)
        return "\n".join(
            [f"## {self.title}", "", table, *(["", self.note] if self.note else []), ""]
        )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


def save_report(
    options: argparse.Namespace,
    name: str,
    tables: Sequence[Table],
    finished: bool = True,
) -> None:
    """Print the tables, and save them as JSON and Markdown.

    The files are named after ``name`` and the device's type. If not ``finished``, nothing is
    printed, and the files say that they are incomplete; they remain if the script is killed.
    """
    environment = describe_environment()
    machine, versions = environment["machine"], environment["versions"]
    device = machine.get("gpu") if options.device != "cpu" else machine["cpu"]
    dtype = str(options.dtype).removeprefix("torch.")
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    footnote = (
        f"{device}, {threads}, {dtype},"
        f" {'compiled' if options.compile else 'not compiled'},"
        f" {environment['date'][:10]}, torch {versions['torch']}, transformers"
        f" {versions['transformers']}, revision {environment['revision']}"
        f"{'' if finished else '; incomplete'}."
    )
    text = "\n".join([*(table.markdown() for table in tables), footnote, ""])
    if finished:
        print(text)
    report = {
        "finished": finished,
        "environment": environment,
        "options": {key: str(value) for key, value in vars(options).items()},
        "tables": {table.title: table.rows for table in tables},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{name}-{options.device.partition(':')[0]}"
    atomic_write(options.out / f"{name}.json", json.dumps(report, indent=2) + "\n")
    atomic_write(options.out / f"{name}.md", text)
