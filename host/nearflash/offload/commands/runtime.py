"""The path from a command line to texts, by a plan or with everything in memory; it loads torch.

A list of prompts by a plan is computed block by block (OffloadedModel.generate). What batches that take turns cannot
follow, a stream, a session, beams and other settings of one call, is one call of nearflash.inference at a time, with
the plan's weights, which come as each layer is called, and engines for K and V; and so is a model that is in memory.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.identity import ModelIdentity
from nearflash.inference.cache.decoder import check_all_layers, check_decoder, kv_shape_of
from nearflash.inference.calibration.choose import AUTO, SHORT_TOKENS, choose_policy
from nearflash.inference.commands.console import estimate, report_progress, summary
from nearflash.inference.generate import Generated, generate, settings_of
from nearflash.inference.models import load_model, model_positions
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.prompts import encode_text, position_limit, prompt_rows, vocabulary_size
from nearflash.inference.session import Session
from nearflash.inference.settings import Caller, GenerationSettings, generation_settings
from nearflash.inference.setup import CPU, check_gpu, check_policy, drive_profile, is_gpu, open_engine, split_parts
from nearflash.offload.cache.block import BatchShape, BlockShape
from nearflash.offload.cache.engines import BlockEngines, KvPlaces, check_engines, engine_read_fraction
from nearflash.offload.commands.options import Computing, plan_by_hand
from nearflash.offload.generation import OffloadedModel
from nearflash.offload.report import OffloadResult
from nearflash.offload.schedule.pipeline import count_ranks
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.weights.skeleton import open_skeleton
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.storage.kv import KvLayout, KvShape, read_kept_layout
from nearflash.support.arguments import Ineffective, reject_ineffective
from nearflash.support.progress import print_step
from nearflash.weights.empty import generation_config_of, load_config
from nearflash.weights.folder import open_folder
from nearflash.weights.pretrained import load_tokenizer, silent_transformers

if TYPE_CHECKING:
    from nearflash.planning.plan_file import PlanFile

__all__ = ["Job", "run"]

_IN_MEMORY = Shares(gpu=1)
_IN_ENGINES = Ineffective(
    ("stripe_ratio", "cache_size", "read_ahead"), lambda _: True,
    "left out where the plan's tiers hold K and V, or given with --attention, --policy, --path or --kv-device",
)  # fmt: skip
"""Of engines that hold none."""
_DRAWN = Ineffective(("seed",), lambda _: True, "given with a temperature above 0: else nothing is drawn")


@dataclass(frozen=True)
class Job:
    """A command's options, checked, with its prompts."""

    arguments: argparse.Namespace
    prompts: Sequence[Any]
    devices: Computing
    sampling: dict[str, Any]
    attention: AttentionPolicy | None
    """By hand; None: by a file, or found."""

    @property
    def caller(self) -> Caller:
        """Who generates where it is one call at a time."""
        return Caller.GENERATE if self.arguments.session is None else Caller.SESSION

    @property
    def seed(self) -> int:
        """The seed of what is drawn."""
        return int(self.arguments.seed or 0)

    def places(self, layout: KvLayout | None) -> KvPlaces:
        """Devices and files on which engines keep K and V."""
        options, devices = self.arguments, self.devices.attention
        return KvPlaces(
            () if devices == (CPU,) else devices, options.num_devices, options.stripe_ratio, options.nand_block_pages,
            tuple(options.path or ()), options.cache_size, layout, options.read_ahead,
        )  # fmt: skip

    def rows(self, tokenizer: Callable[[], Any], vocabulary: int) -> list[list[int]]:
        """Tokens of the prompts; the tokenizer is loaded for texts alone."""
        return prompt_rows(
            list(self.prompts), lambda text: encode_text(tokenizer(), text, chat=self.arguments.chat), vocabulary
        )


@dataclass(frozen=True)
class _Call:
    """Model, prompts and places of K and V of a job that generates by one call at a time."""

    model: Any
    tokenizer: Any
    rows: list[list[int]]
    settings: GenerationSettings
    policy: OffloadPolicy
    """Of K and V."""
    attention: AttentionPolicy
    layout: KvLayout | None
    tokens: int
    """Of the longest sequence."""
    ledger: Ledger
    scratch: Path | None = None
    identity: ModelIdentity | None = None
    stored: tuple[str, ...] = ()
    """Names of weights that are read from files."""


def run(job: Job) -> int:
    """Generate; returns the exit code. Raises what is wrong with options, model and plan before anything is loaded."""
    if is_gpu(job.devices.model):
        check_gpu(job.devices.model)
    planned = job.arguments.plan is not None or plan_by_hand(job.arguments) is not None
    with nullcontext() if job.arguments.verbose else silent_transformers():
        return _run_by_plan(job) if planned else _run_in_memory(job)


def _run_in_memory(job: Job) -> int:
    options = job.arguments
    model, tokenizer = load_model(options.model, options.dtype or "fp32", verbose=options.verbose)
    if is_gpu(job.devices.model):
        model = model.to(job.devices.model)
    rows, shape = job.rows(lambda: tokenizer, vocabulary_size(model)), kv_shape_of(model.config)
    settings = settings_of(model, tokenizer, job.caller, rows, options.max_new_tokens, job.sampling)
    if not settings.is_sampled:
        reject_ineffective(options, _DRAWN)
    sequences = len(rows) * settings.num_beams
    policy = OffloadPolicy(len(rows), 1, _IN_MEMORY, _IN_MEMORY, _IN_MEMORY)
    tokens = _sequence_tokens(job, model.config, rows, settings)
    attention, layout, sentence = _choose_attention(job, model.config, shape, tokens, sequences, model)
    print(sentence, file=sys.stderr)
    paths = [options.session] if options.session else options.path or [None]
    if job.devices.have_files:
        for line in estimate(shape, attention, tokens, sequences, paths, options.stripe_ratio):
            print(line, file=sys.stderr)
    call = _Call(model, tokenizer, rows, settings, policy, attention, layout, tokens, Ledger())
    return _continue(job, call, [rows])


def _run_by_plan(job: Job) -> int:
    options, folder = job.arguments, open_folder(job.arguments.model)
    config = load_config(folder)
    tokenizer = cache(partial(load_tokenizer, options.model, verbose=options.verbose))
    vocabulary = config.get_text_config(decoder=True).vocab_size
    rows = job.rows(tokenizer, vocabulary)
    settings, one_call = _settings_by_plan(job, rows, config, folder.path, vocabulary)
    if not settings.is_sampled:
        reject_ineffective(options, _DRAWN)
    tokens, sequences = _sequence_tokens(job, config, rows, settings), len(rows) * settings.num_beams
    kept = _read_plan(options)
    bits = 16 if kept is None else kept[1].policy.cache_bits
    attention, layout, sentence = _attention_by_plan(job, config, folder.path, tokens, sequences, one_call, bits)
    read = 1.0 if attention is None else engine_read_fraction(attention, kv_shape_of(config), tokens, layout)
    plan, policy, line = _plan(options, kept, max(map(len, rows)), settings.max_new_tokens, sequences, read)
    if options.no_overlap:
        policy = replace(policy, overlap=False)
    print(line, file=sys.stderr)
    if sentence:
        print(sentence, file=sys.stderr)
    places = job.places(layout)
    _check_places(job, config, policy, attention, places, one_call)
    experts = None if options.expert_memory is None else int(options.expert_memory)
    with OffloadedModel(
        options.model, policy, device=job.devices.model, scratch=options.scratch, expert_bytes=experts,
        expand_device=options.expand_device, weights_paths=options.weights_path or (),
        weights_ratio=options.weights_ratio, announce=partial(print, file=sys.stderr),
    ) as model:  # fmt: skip
        if model.path_to_gpu:
            print(model.path_to_gpu, file=sys.stderr)
        if one_call:
            assert attention is not None
            identity = ModelIdentity.of(model.model, tokenizer()) if options.session is not None else None
            with model.call_by_layer() as called:
                call = _Call(called, tokenizer(), rows, settings, policy, attention, layout, tokens, model.ledger,
                             options.scratch, identity, model.source_names)  # fmt: skip
                size = max(policy.block_size // settings.num_beams, 1)
                code = _continue(job, call, [rows[at : at + size] for at in range(0, len(rows), size)])
            print(_link_line(model.ledger.links), file=sys.stderr)
        else:
            code = _compute_blocks(job, model, rows, settings, plan, attention, places)
        if moved := model.bytes_by_path:
            print(f"weights from {', '.join(f'{path} {size / 1e6:,.1f} MB' for path, size in moved.items())}",
                  file=sys.stderr)  # fmt: skip
        if options.trace is not None:
            _write_trace(model, options.trace, plan, len(rows))
    return code


def _attention_by_plan(
    job: Job, config: Any, folder: Path, tokens: int, sequences: int, one_call: bool, cache_bits: int
) -> tuple[AttentionPolicy | None, KvLayout | None, str]:
    """The attention policy of a plan's engines, as `_choose_attention`; None where nobody asked for one and engines
    would hold nothing: short contexts, a plan that keeps K and V in 4 bits, several ranks, a model that they do not
    serve."""
    options, skeleton = job.arguments, cache(lambda: open_skeleton(folder).model)
    if not (one_call or options.policy is not None or job.attention is not None):
        by_hand = plan_by_hand(options)
        bits = cache_bits if by_hand is None else by_hand.cache_bits
        if tokens <= SHORT_TOKENS or count_ranks() > 1 or bits != 16:
            return None, None, ""
        try:
            check_decoder(skeleton())
        except UnsupportedError as error:
            return None, None, f"policy: dense, K and V on the plan's tiers, as {error}"
    is_file = job.attention is None and (tokens > SHORT_TOKENS or options.policy not in (None, AUTO))
    compared = skeleton() if is_file else None
    return _choose_attention(job, config, kv_shape_of(config), tokens, sequences, compared)


def _compute_blocks(
    job: Job, model: OffloadedModel, rows: list[list[int]], settings: GenerationSettings, plan: "PlanFile | None",
    attention: AttentionPolicy | None, places: KvPlaces,
) -> int:  # fmt: skip
    options, first = job.arguments, model.stage.rank == 0
    done = model.generate(
        rows, max_new_tokens=settings.max_new_tokens, seed=job.seed, attention=attention, places=places,
        results=options.results if first else None, progress=_report_blocks if first else None, **job.sampling,
    )  # fmt: skip
    if first:
        _print_texts(job, done.tokens, done.texts)
    predicted = None if plan is None else plan.prediction["tokens_per_second"]
    for line in _figures(done, predicted):
        print(line if model.stage.ranks == 1 else f"rank {model.stage.rank}: {line.strip()}", file=sys.stderr)
    return 0


def _write_trace(model: OffloadedModel, file: Path, plan: "PlanFile | None", sequences: int) -> None:
    """Write what ran and what was predicted; each rank its own."""
    from nearflash.planning.spans import predict_spans

    rank = model.stage.rank
    name = file if rank == 0 else file.with_stem(f"{file.stem}-{rank}")
    model.ledger.timeline.write(name, () if plan is None else predict_spans(plan, sequences))


def _continue(job: Job, call: _Call, parts: Sequence[list[list[int]]]) -> int:
    """Generate, one call for each part of the prompts."""
    options, tokens, texts = job.arguments, list[list[int]](), list[str]()
    passed = dict(max_new_tokens=options.max_new_tokens, seed=job.seed, **job.sampling,
                  stream=sys.stdout if options.stream else None,
                  progress=None if options.stream else report_progress)  # fmt: skip
    if options.stream:
        print("" if options.chat else job.prompts[0], end="", flush=True)
    if options.session is not None:
        with open_engine(
            kv_shape_of(call.model.config), call.attention, tokens=call.tokens, sequences=1, path=options.session,
            device=job.devices.attention[0], layout=call.layout, cache_bytes=options.cache_size, keep=True,
            read_ahead=options.read_ahead,
        ) as engine:  # fmt: skip
            session = Session(call.model, call.tokenizer, engine, identity=call.identity, stored=call.stored)
            before = len(session.tokens)
            done: Generated = (session.reply if options.chat else session.generate)(job.prompts[0], **passed)
        used = f"session: {before} tokens before; K and V of {done.reused_tokens} of them are used again"
        print(f"{used}\n{summary(done)}", file=sys.stderr)
        tokens, texts = done.tokens, done.texts
    else:
        sequences = max(map(len, parts)) * call.settings.num_beams
        shape = BlockShape((BatchShape(sequences, call.tokens),), max(map(len, call.rows)))
        with BlockEngines(
            call.model.config, call.policy, call.attention, job.places(call.layout), [shape], ledger=call.ledger,
            scratch=call.scratch, always=True,
        ) as engines:  # fmt: skip
            held = engines.of(0, 1)
            assert held is not None
            for part in parts:
                done = generate(call.model, call.tokenizer, part, held, mini_batches=options.mini_batches, **passed)
                tokens, texts = tokens + done.tokens, texts + done.texts
                print(summary(done), file=sys.stderr)
    if not options.stream:
        _print_texts(job, tokens, texts)
    return 0


def _print_texts(job: Job, tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> None:
    for number, (prompt, new, text) in enumerate(zip(job.prompts, tokens, texts, strict=True)):
        if job.arguments.json:
            print(json.dumps({"prompt": number, "tokens": list(new), "text": text}))
        else:
            print(f"{prompt}{' => ' if job.arguments.chat else ''}{text}\n")


def _settings_by_plan(
    job: Job, rows: list[list[int]], config: Any, folder: Path, vocabulary: int
) -> tuple[GenerationSettings, bool]:
    """The settings by a plan, and whether they are followed by one call at a time. Raises CommandError for results of
    such a call, and what no caller follows."""
    options = job.arguments
    own, length = generation_config_of(folder), {}
    if options.max_new_tokens is not None:
        length = {"max_new_tokens": options.max_new_tokens}
    resolve = partial(
        generation_settings, own, lengths=list(map(len, rows)), vocabulary=vocabulary,
        positions=position_limit(config), options=job.sampling | length,
    )  # fmt: skip
    if options.session is not None or options.stream:
        return resolve(caller=job.caller), True
    try:
        return resolve(caller=Caller.PLAN), False
    except UnsupportedError as error:
        settings = resolve(caller=job.caller)
        if options.results is not None:
            raise CommandError(f"results must be left out: they are of batches that take turns, but {error}") from error
        return settings, True


def _sequence_tokens(job: Job, config: Any, rows: list[list[int]], settings: GenerationSettings) -> int:
    """Tokens of the longest sequence that there must be room for."""
    if job.arguments.session is not None:
        return int(job.arguments.session_tokens or model_positions(config))
    return max(map(len, rows)) + settings.max_new_tokens


def _choose_attention(
    job: Job, config: Any, shape: KvShape, tokens: int, sequences: int, model: Any
) -> tuple[AttentionPolicy, KvLayout | None, str]:
    """The attention policy, the layout that it is for, and a sentence: which it is, and why."""
    options, on_file = job.arguments, job.devices.have_files
    path = options.session or (options.path or [None])[0]
    if path is None and getattr(options, "scratch", None) is not None:
        path = options.scratch / "kv"
    layout = None if options.session is None else read_kept_layout(options.session)
    if job.attention is not None:
        return job.attention, layout, f"policy: {job.attention.mode}, as the options say"
    attention, own_layout, sentence = choose_policy(
        config, shape, tokens, options.policy or AUTO, stored=layout, sequences=sequences,
        profile=drive_profile(path) if on_file else None, cache_bytes=options.cache_size, model=model,
    )  # fmt: skip
    return attention, layout or own_layout, sentence


def _check_places(
    job: Job, config: Any, policy: OffloadPolicy, attention: AttentionPolicy | None, places: KvPlaces, one_call: bool
) -> None:
    """Raise CommandError for a plan that the places do not fit, before anything is loaded."""
    if policy.cache.device and not places.attends_on_device:
        raise CommandError(
            f"kv_device must be given: the plan places {policy.cache.device:.0%} of the KV cache on near-storage "
            "drives, which attend to it; nearflash devices lists those that are there"
        )
    if job.arguments.session is not None:
        check_all_layers(config)
        if job.arguments.expert_memory is not None:
            raise CommandError("expert_memory must be left out with session, which compares all weights")
        if policy.cache_bits != 16:
            raise CommandError("cache_bits must be 16 with session, whose file has K and V in fp16, not 4")
        return
    if check_engines(policy, attention, places, always=one_call):
        parts = split_parts(kv_shape_of(config).kv_heads, places.devices or CPU, places.num_devices,
                            places.paths or None, places.stripe_ratio)  # fmt: skip
        if attention is not None:
            check_policy(attention, [device for device, _, _ in parts], read_ahead=places.read_ahead)
    else:
        reject_ineffective(job.arguments, _IN_ENGINES)


def _plan(
    arguments: argparse.Namespace, kept: "tuple[Path, PlanFile] | None", prompt_tokens: int, new_tokens: int,
    sequences: int, read_fraction: float,
) -> tuple["PlanFile | None", OffloadPolicy, str]:  # fmt: skip
    """The plan, as a file holds it (None: by hand), its policy, and a line about it; kept: its file, if it has one.
    Raises PlanError.
    """
    if (by_hand := plan_by_hand(arguments)) is not None:
        return None, by_hand, "plan: as the options say"
    from nearflash.offload.machine.plan import model_shape, plan_here  # needs scipy, as all that follows a plan does
    from nearflash.planning.explain import one_line
    from nearflash.planning.plan_file import PlanFile
    from nearflash.planning.search import Workload

    model = Path(arguments.model)
    if kept is None:
        if (ranks := count_ranks()) > 1:
            raise CommandError(f"plan must be a file with {ranks} ranks, each of which would search for its own: "
                               f"nearflash plan MODEL --ranks {ranks} -o FILE")  # fmt: skip
        workload = Workload(prompt_tokens, new_tokens)
        folder = arguments.scratch or Path()
        memory = {f"{name}_bytes": value for name, value in _budgets(arguments).items()}
        plan = plan_here(model, workload, sequences, folder, memory, read_fraction=read_fraction)
        return PlanFile.of(plan), plan.policy, one_line(plan)
    file, plan_file = kept
    plan_file.check(*model_shape(model), count_ranks())
    predicted = plan_file.prediction["tokens_per_second"]
    return plan_file, plan_file.policy, f"plan: {file}, {predicted:.3g} token/s predicted on {plan_file.machine}"


def _read_plan(arguments: argparse.Namespace) -> "tuple[Path, PlanFile] | None":
    """The plan's file and its content, which is read once; None where it is searched, or by hand. Raises PlanError, and
    CommandError for budgets beside a file.
    """
    if plan_by_hand(arguments) is not None:
        return None
    from nearflash.planning.plan_file import PLAN_NAME, read_plan

    budgets = _budgets(arguments)
    if arguments.plan == AUTO:
        file = Path(arguments.model) / PLAN_NAME
        return None if budgets or not file.is_file() else (file, read_plan(file))
    if budgets:
        names = ", ".join(budgets)
        raise CommandError(f"{names} must be given with --plan auto: the plan in {arguments.plan} was made for its own")
    return Path(arguments.plan), read_plan(Path(arguments.plan))


def _budgets(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes of tiers that are to be filled at most, where that was said."""
    named = {"gpu": arguments.gpu_memory, "host": arguments.host_memory, "disk": arguments.disk}
    return {name: value for name, value in named.items() if value is not None}


def _report_blocks(done: Any) -> None:
    line = (
        f"{done.finished} of {done.prompts} texts, token {done.step} of {done.steps}  "
        f"{done.tokens_per_s:.3g} token/s  {done.remaining_s:.0f} s left"
    )
    print_step(line, done.step, done.steps, 16)


def _figures(done: OffloadResult, predicted: float | None) -> list[str]:
    """Lines after the run."""
    report = done.report
    if not report.new_tokens:
        return [f"all {done.resumed} texts were in the results already"]
    parts = ", ".join(f"{name} {spent:.2f} s" for name, spent in report.seconds.items() if spent >= 0.005)
    held = ", ".join(f"{tier} {size / 1e6:,.1f} MB" for tier, size in report.peak_bytes.items() if size)
    rate = f"{report.tokens_per_s:.3g} token/s" + ("" if predicted is None else f", {predicted:.3g} predicted")
    lines = [
        f"{report.new_tokens} tokens in {report.total_s:.2f} s: {rate}",
        f"seconds: {parts}",
        _link_line(report.link_bytes),
        f"at most in use: {held}; the process {report.peak_process_bytes / 1e6:,.0f} MB",
    ]
    if report.expert_hits or report.expert_misses:
        lines.append(f"experts: {report.expert_hit_rate:.2f} of those routed were in memory")
    return lines


def _link_line(links: dict[str, int]) -> str:
    return f"moved: {', '.join(f'{link} {size / 1e6:,.1f} MB' for link, size in links.items() if size) or 'nothing'}"
