"""Settings of a generation: every field of transformers' GenerationConfig, for every caller alike.

A field's value is the caller's; where the caller gives none, that of the `generation_config` which the caller gives;
then the model folder's; then transformers' default. What a caller cannot follow is rejected by its name before anything
is computed. docs/contracts/generation.md has the table; a test compares both with transformers' own generate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from transformers import GenerationConfig

from nearflash.abi.errors import CommandError, NearflashError, UnsupportedError

__all__ = ["EXTRAS", "FIELDS", "Caller", "FieldRule", "GenerationSettings", "check_processors", "check_seed",
           "generation_settings", "raise_command_errors"]  # fmt: skip


class Caller(StrEnum):
    """Who generates."""

    GENERATE = "generate"
    """nearflash.inference.generate, the command without --plan and --session."""
    SESSION = "--session"
    """Session.generate and Session.reply."""
    PLAN = "--plan"
    """nearflash.offload."""


@dataclass(frozen=True)
class FieldRule:
    """How a field is treated."""

    rejected: Mapping[Caller, str] = field(default_factory=dict)
    """Why it is, by caller: for values other than `neutral`."""
    neutral: tuple[Any, ...] = (None, False)
    note: str = ""
    fixed: tuple[Any] | None = None
    """What transformers gets in place of any value."""


def _use(note: str = "") -> FieldRule:
    return FieldRule(note=note)


def _fix(value: Any, note: str) -> FieldRule:
    return FieldRule(note=note, fixed=(value,))


def _not(why: str, *callers: Caller, neutral: tuple[Any, ...] = (None, False)) -> FieldRule:
    return FieldRule(dict.fromkeys(callers or tuple(Caller), why), neutral)


_PLAN = Caller.PLAN
_SINGLE = "a result has one text for each prompt: list the prompt several times, and draw"
_ASSISTED = "drafts of another model, or of parts of this one, are not supported: leave them out, or use " \
    "prompt_lookup_num_tokens"  # fmt: skip
_GONE = "transformers itself has no code for it any more"
_DRAWN = _use("where tokens are drawn")
_BEAMS = _use("with `num_beams`")
_DRAFTS = _use("with `prompt_lookup_num_tokens`")
_ELSEWHERE = "K and V lie where this program keeps them; tokens are the same"
_OUTPUT = "a result has texts, tokens and times alone: call model.generate(past_key_values=NearflashCache(engine, " \
    "model.config)) for it"  # fmt: skip

FIELDS: Mapping[str, FieldRule] = {
    "max_length": _fix(None, "less the longest prompt, where `max_new_tokens` is not given"),
    "max_new_tokens": _use("64 where nothing states a length, or as many as the model has positions for"),
    "min_length": _fix(None, "less the longest prompt, where `min_new_tokens` is not given"),
    "min_new_tokens": _use(),
    "early_stopping": _BEAMS,
    "max_time": _not("batches take turns, layer by layer, and end together", _PLAN),
    "stop_strings": _fix(None, "each text ends with its own; not with `num_beams`"),
    "do_sample": _use("with one mini-batch; with --plan by random numbers of each prompt's own"),
    "num_beams": _not("its batches keep one sequence for each prompt", Caller.SESSION, _PLAN, neutral=(None, 1)),
    "use_mtp": _not(_ASSISTED),
    "use_cache": _fix(True, _ELSEWHERE),
    "cache_implementation": FieldRule(
        dict.fromkeys(Caller, "it stores K and V in fewer bits, which gives other tokens: use a policy, or a plan's"
                      " cache_bits"),
        (None, False, "static", "offloaded", "offloaded_static", "hybrid", "hybrid_chunked",
         "offloaded_hybrid", "offloaded_hybrid_chunked", "sliding_window", "paged",
         "dynamic"),
        _ELSEWHERE, (None,),
    ),
    "cache_config": _fix(None, "of a quantized cache alone"),
    "max_cache_len": _fix(None, _ELSEWHERE),
    "temperature": _DRAWN,
    "top_k": _DRAWN,
    "top_p": _DRAWN,
    "min_p": _DRAWN,
    "top_h": _DRAWN,
    "typical_p": _DRAWN,
    "epsilon_cutoff": _DRAWN,
    "eta_cutoff": _DRAWN,
    "repetition_penalty": _use(),
    "encoder_repetition_penalty": _use("of the prompt's tokens"),
    "length_penalty": _BEAMS,
    "no_repeat_ngram_size": _use(),
    "bad_words_ids": _use(),
    "renormalize_logits": _use(),
    "forced_bos_token_id": _use("after a prompt of one token"),
    "forced_eos_token_id": _use(),
    "remove_invalid_values": _use(),
    "exponential_decay_length_penalty": _use(),
    "suppress_tokens": _use(),
    "begin_suppress_tokens": _use(),
    "sequence_bias": _use(),
    "token_healing": _not("it changes the prompt's tokens: leave it out, and end prompts with a whole word"),
    "guidance_scale": _not("it computes each token twice, outside of the plan", _PLAN, neutral=(None, 1)),
    "watermarking_config": _not("its random numbers are not those of the plan's batches", _PLAN),
    "num_return_sequences": _not(_SINGLE, neutral=(None, 1)),
    "output_attentions": _not(_OUTPUT),
    "output_hidden_states": _not(_OUTPUT),
    "output_scores": _not(_OUTPUT),
    "output_logits": _not(_OUTPUT),
    "return_dict_in_generate": _fix(False, "the result is this program's own; tokens are the same"),
    "pad_token_id": _use("where the model has it; no token of a result"),
    "bos_token_id": _use("of prompts without a token, which are rejected"),
    "eos_token_id": _use(),
    "encoder_no_repeat_ngram_size": _use("of the prompt's tokens"),
    "decoder_start_token_id": _use("of models with an encoder, which are rejected"),
    "is_assistant": _not(_ASSISTED),
    "num_assistant_tokens": _DRAFTS,
    "num_assistant_tokens_schedule": _DRAFTS,
    "assistant_confidence_threshold": _DRAFTS,
    "prompt_lookup_num_tokens": FieldRule(
        {_PLAN: "its batches take one token at a time"}, note="a session computes the whole prompt again"
    ),
    "max_matching_ngram_size": _DRAFTS,
    "assistant_early_exit": _not(_ASSISTED),
    "assistant_lookbehind": _DRAFTS,
    "target_lookbehind": _DRAFTS,
    "assistant_ensemble_weight": _not(_ASSISTED),
    "speculation_type": _not(_ASSISTED),
    "compile_config": _fix(None, "the model is called as it is; tokens are the same"),
    "disable_compile": _fix(True, "the model is called as it is; tokens are the same"),
    "continuous_batching_config": _fix(None, "of transformers' generate_batch alone"),
    "low_memory": _not(_GONE),
    "penalty_alpha": _not(_GONE, neutral=(None, 0)),
    "dola_layers": _not(_GONE, neutral=(None,)),
    "diversity_penalty": _not(_GONE, neutral=(None, 0)),
    "num_beam_groups": _not(_GONE, neutral=(None, 1)),
    "constraints": _not(_GONE, neutral=(None,)),
    "force_words_ids": _not(_GONE, neutral=(None,)),
    "prefill_chunk_size": _use("a plan splits prompts by itself"),
}  # fmt: skip
"""Of every field that changes what is generated, by name."""
EXTRAS = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "negative_prompt_ids",
    "negative_prompt_attention_mask",
)  # fmt: skip
"""Options of model.generate that are no fields, which `generate` and sessions take, too."""
_ABOUT = ("_from_model_config", "transformers_version")
"""What a configuration says of itself."""
_DEFAULT_NEW = 64
_IDS = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id")
"""Fields with tokens that must be the model's."""
_LEAST = {
    "num_beams": 1, "prompt_lookup_num_tokens": 1, "max_matching_ngram_size": 1, "prefill_chunk_size": 1,
    "min_new_tokens": 0,
}  # fmt: skip
"""Of fields that are counts: transformers finds a wrong one only while it computes."""


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of one generation."""

    fields: Mapping[str, Any]
    """Every field, resolved; lengths are numbers of new tokens."""
    extras: Mapping[str, Any]
    stops: tuple[int, ...]
    """Tokens that end a text."""

    @property
    def max_new_tokens(self) -> int:
        """Most new tokens of each text."""
        return int(self.fields["max_new_tokens"])

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, not the likeliest taken."""
        return bool(self.fields["do_sample"])

    @property
    def num_beams(self) -> int:
        """Sequences that are computed for each prompt."""
        return int(self.fields["num_beams"] or 1)

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a text."""
        given = self.fields["stop_strings"] or []
        return [given] if isinstance(given, str) else list(given)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of model.generate: all fields, so that none of the model's own is added, and the extras.

        Stop strings and criteria are not among them: nearflash.inference.progress.Ends has them.
        """
        fixed = {name: rule.fixed[0] for name, rule in FIELDS.items() if rule.fixed is not None}
        extras = {name: value for name, value in self.extras.items() if name != "stopping_criteria"}
        return {**self.fields, **fixed, **extras}

    @property
    def repeating(self) -> dict[str, Any]:
        """Keyword arguments of model.generate that take the likeliest of each step, for just as long."""
        fixed = {name: rule.fixed[0] for name, rule in FIELDS.items() if rule.fixed is not None}
        same = ("max_new_tokens", "eos_token_id", "pad_token_id")
        return {**_defaults(), **fixed, **{name: self.fields[name] for name in same}}

    @property
    def stated(self) -> dict[str, Any]:
        """Fields that differ from transformers' defaults, as JSON has them: for what must be of the same settings."""
        plain = GenerationConfig(**self.fields).to_dict()
        defaults = _defaults()
        names = (name for name in FIELDS if plain.get(name) != defaults[name])
        return {name: _as_json(plain[name]) for name in names}


def generation_settings(
    own: GenerationConfig, caller: Caller, lengths: Sequence[int], *, vocabulary: int, positions: int | None = None,
    pad: int | None = None, options: Mapping[str, Any] | None = None,
) -> GenerationSettings:  # fmt: skip
    """Settings of a generation after prompts of `lengths` tokens.

    own: the model's. positions: of the model (nearflash.inference.prompts.position_limit). pad: the tokenizer's.
    options: of the call: fields, a `generation_config`, and those of EXTRAS.
    Raises CommandError for an option that is none, for values that transformers does not take, and where prompts and
    new tokens need more positions than there are; UnsupportedError for what the caller does not follow.
    """
    given = dict(options or {})
    whole = given.pop("generation_config", None)
    if whole is not None and not isinstance(whole, GenerationConfig):
        raise CommandError(f"generation_config must be a GenerationConfig, not {type(whole).__name__}")
    extras = {name: given.pop(name) for name in (EXTRAS if caller is not _PLAN else ()) if name in given}
    if unknown := sorted(given.keys() - FIELDS.keys()):
        raise CommandError(f"{unknown[0]} must be left out: it is no field of GenerationConfig that {caller} takes")
    asked = {**_read_stated(own, caller), **(_read_stated(whole, caller) if whole is not None else {}), **given}
    fields = {**_defaults(), **asked}
    for name, rule in FIELDS.items():
        if caller in rule.rejected and not _is_neutral(fields[name], rule):
            plain = next((value for value in reversed(rule.neutral) if isinstance(value, type(fields[name]))), None)
            where = f"give {name}={plain!r}" if name in given else "edit the model's generation_config.json"
            raise UnsupportedError(
                f"{name} must be {plain!r} with {caller}, not {fields[name]!r} ({where}): {rule.rejected[caller]}"
            )
    fields |= _lengths(given, asked, max(lengths), positions)
    fields["eos_token_id"] = list(stops := _stop_tokens(fields["eos_token_id"])) or None
    fields["pad_token_id"] = _pad_token((fields["pad_token_id"], pad, *stops), vocabulary)
    fields |= {"use_cache": True, "continuous_batching_config": None}
    _check_values(fields, vocabulary)
    try:
        checked = GenerationConfig(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"generation settings must be values that transformers takes: {error}") from error
    settings = GenerationSettings({name: getattr(checked, name) for name in FIELDS}, extras, stops)
    if settings.num_beams > 1 and (settings.stop_strings or extras.get("stopping_criteria")):
        raise UnsupportedError("num_beams must be 1 with stop_strings or stopping_criteria: a beam's end is not theirs")
    return settings


def check_processors(model: Any, settings: GenerationSettings, prompt: Sequence[int]) -> None:
    """Raise CommandError for values of which transformers makes no logits processors, before anything is computed."""
    options, ids = settings.options, torch.tensor([prompt])
    config = GenerationConfig(**{name: options[name] for name in FIELDS})
    config.max_length = len(prompt) + settings.max_new_tokens
    with raise_command_errors(lambda: True):
        model._prepare_special_tokens(config, True, device="cpu", batch_size=1)
        model._get_logits_processor(
            config, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device="cpu",
            **{name: value for name, value in settings.extras.items() if name != "stopping_criteria"},
        )  # fmt: skip


@contextmanager
def raise_command_errors(is_untouched: Callable[[], bool]) -> Iterator[None]:
    """Errors of transformers about settings become CommandErrors while nothing is computed."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, NearflashError) or not is_untouched():
            raise
        raise CommandError(f"generation settings must be values that transformers takes: {error}") from error


def _defaults() -> dict[str, Any]:
    """Transformers' default of every field."""
    return dict.fromkeys(FIELDS) | {
        name: value for name, value in GenerationConfig._get_default_generation_params().items()
        if name in FIELDS and name != "max_length"
    }  # fmt: skip


def _read_stated(config: GenerationConfig, caller: Caller) -> dict[str, Any]:
    """Fields that a configuration states. Raises UnsupportedError for one of a later transformers."""
    known = vars(GenerationConfig())
    stated = {name: value for name, value in vars(config).items() if value is not None and name in known}
    if later := sorted(stated.keys() - FIELDS.keys() - set(_ABOUT)):
        raise UnsupportedError(
            f"{later[0]} must be left out of the generation configuration: {caller} has no rule for it"
        )
    return {name: value for name, value in stated.items() if name in FIELDS}


def _is_neutral(value: Any, rule: FieldRule) -> bool:
    return any(value is neutral or (type(value) in (int, float, str) and value == neutral) for neutral in rule.neutral)


def _lengths(
    given: Mapping[str, Any], asked: Mapping[str, Any], longest: int, positions: int | None
) -> dict[str, int | None]:
    """Lengths in new tokens; what the call states comes before what the model does."""
    left = None if positions is None else positions - longest
    if left is not None and left < 1:
        raise CommandError(f"prompts must have fewer tokens than the model has positions, {positions}, not {longest}")
    wanted = None
    for stated in (given, asked):
        for name, prompt in (("max_new_tokens", 0), ("max_length", longest)):
            if wanted is None and (value := stated.get(name)) is not None:
                wanted = _whole(name, value) - prompt
                if wanted < 1:
                    raise CommandError(f"{name} must be {prompt + 1} or more, not {value!r}; the longest prompt has "
                                       f"{longest} tokens")  # fmt: skip
    wanted = wanted or min(_DEFAULT_NEW, left or _DEFAULT_NEW)
    if left is not None and wanted > left:
        raise CommandError(
            f"max_new_tokens must be {left} or less after {longest} tokens, not {wanted}: the model has {positions} "
            "positions"
        )
    least = asked.get("min_new_tokens")
    if least is None and asked.get("min_length"):
        least = max(_whole("min_length", asked["min_length"]) - longest, 0) or None
    return {"max_new_tokens": wanted, "max_length": None, "min_new_tokens": least, "min_length": None}


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CommandError(f"{name} must be a whole number, not {value!r}")
    return value


def _stop_tokens(value: Any) -> tuple[int, ...]:
    listed = value.tolist() if hasattr(value, "tolist") else value
    listed = () if listed is None else listed if isinstance(listed, list | tuple) else (listed,)
    return tuple(_whole("eos_token_id", token) for token in listed)


def _pad_token(candidates: Sequence[Any], vocabulary: int) -> int:
    """The first that the model has; 0 where it has none. It is masked before a prompt, and cut off after a text."""
    return next((token for token in candidates if type(token) is int and 0 <= token < vocabulary), 0)


def check_seed(seed: Any) -> None:
    """Raise CommandError for what torch takes no random numbers from."""
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 64):
        raise CommandError(f"seed must be a whole number of at most 64 bits, or None, not {seed!r}")


def _check_values(fields: Mapping[str, Any], vocabulary: int) -> None:
    for name, least in _LEAST.items():
        if (value := fields[name]) is not None and _whole(name, value) < least:
            raise CommandError(f"{name} must be {least} or more, or None, not {value!r}")
    if (spent := fields["max_time"]) is not None and (type(spent) not in (int, float) or not spent >= 0):
        raise CommandError(f"max_time must be a number of seconds, 0 or more, not {spent!r}")
    _check_decay(fields)
    strings = fields["stop_strings"]
    listed = [strings] if isinstance(strings, str) else strings or []
    if not isinstance(listed, list | tuple) or not all(isinstance(text, str) and text for text in listed):
        raise CommandError(f"stop_strings must be texts that are not empty, not {strings!r}")
    for name in _IDS:
        if wrong := [id_ for id_ in _tokens_in(name, fields[name]) if type(id_) is int and not 0 <= id_ < vocabulary]:
            raise CommandError(f"{name} must have tokens of the model, 0 to {vocabulary - 1}, not {wrong[0]}")


def _check_decay(fields: Mapping[str, Any]) -> None:
    name = "exponential_decay_length_penalty"
    if (value := fields[name]) is None:
        return
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(type(item) in (int, float) for item in value)):
        raise CommandError(f"{name} must be a token's number and a factor, (start, factor), not {value!r}")
    if not fields["eos_token_id"]:
        raise CommandError(f"{name} must be given with eos_token_id, whose score it raises: there is none")


def _tokens_in(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value)
    elif name == "sequence_bias" and isinstance(value, list | tuple):
        value = [item[0] for item in value if isinstance(item, list | tuple) and item]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tokens_in("", item)
    else:
        yield value


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value
