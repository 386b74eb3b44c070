"""The shape of a decoder from the names and shapes of its parameters: exact, whatever the family."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from nearflash.abi.errors import PlanError
from nearflash.planning.shapes import LayerShape, Linear, ModelShape, from_config, text_config

__all__ = ["from_parameters"]

_NUMBERED = re.compile(r"^(.*?)\.?(\d+)\.(.+)$")
_EXPERTS = re.compile(r"(?:^|\.)experts\.(?:(\d+)\.)?")
_HEAD = re.compile(r"head|embed_out|output")


def from_parameters(parameters: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> ModelShape:
    """The shape of a model with these parameters (by name, without tied ones twice) and this configuration.

    Layers are the longest numbered list; what lies outside counts as embedding, head or vectors. Raises PlanError for
    parameters without such a list.
    """
    by_rule = from_config(config)
    prefix = _layers_prefix(parameters, len(by_rule.layers))
    inside: dict[int, dict[str, Sequence[int]]] = {}
    outside: dict[str, Sequence[int]] = {}
    for name, shape in parameters.items():
        match = _NUMBERED.match(name)
        if match and match[1] == prefix:
            inside.setdefault(int(match[2]), {})[match[3]] = shape
        else:
            outside[name] = shape
    experts = [layer.experts for layer in by_rule.layers]
    chosen = max((layer.experts_per_token for layer in by_rule.layers), default=0)
    layers = tuple(_layer(inside[at], experts[at], chosen) for at in sorted(inside))
    vocabulary = int(text_config(config)["vocab_size"])
    tables = {name: prod(shape) for name, shape in outside.items() if _is_matrix(name, shape)}
    wide = {name: size for name, size in tables.items() if vocabulary in outside[name]}
    heads = {name: size for name, size in wide.items() if _HEAD.search(name)}
    tied = not heads
    head = sum(heads.values()) if heads else max(wide.values(), default=0)
    return ModelShape(
        hidden=by_rule.hidden,
        heads=by_rule.heads,
        kv_heads=by_rule.kv_heads,
        head_dim=by_rule.head_dim,
        vocabulary=vocabulary,
        max_tokens=by_rule.max_tokens,
        layers=layers,
        embedding=sum(tables.values()) - sum(heads.values()),
        head=head,
        tied=tied,
        vectors=sum(prod(shape) for name, shape in outside.items() if name not in tables),
        element_bytes=by_rule.element_bytes,
    )


def _layers_prefix(parameters: Mapping[str, Sequence[int]], number: int) -> str:
    """The list of layers: as long as the configuration has it, of most parameters."""
    numbers: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for name, shape in parameters.items():
        if match := _NUMBERED.match(name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
            sizes[match[1]] = sizes.get(match[1], 0) + prod(shape)
    fitting = [prefix for prefix, layers in numbers.items() if layers == set(range(number))]
    if not fitting:
        raise PlanError(f"parameters must have a list of {number} layers, as the config has, not lists of "
                        f"{', '.join(str(len(layers)) for layers in numbers.values()) or 'none'}")  # fmt: skip
    return max(fitting, key=sizes.__getitem__)


def _layer(parameters: Mapping[str, Sequence[int]], experts: int, chosen: int) -> LayerShape:
    linears: dict[str, Linear] = {}
    vectors = expert_vectors = 0
    for name, shape in parameters.items():
        match = _EXPERTS.search(name)
        if match is None or not experts:
            if _is_matrix(name, shape):
                linears[name] = Linear(name.replace("experts.", "expert."), *_sides(shape))
            else:
                vectors += prod(shape)
            continue
        # Experts are one tensor with a dimension of its own, or a tensor each.
        matrix = shape if match[1] else shape[1:]
        name_of_all = name[: match.end()].replace(f"{match[1]}.", "") + name[match.end() :] if match[1] else name
        if not match[1] and (not shape or shape[0] != experts):
            many = shape[0] if shape else "none"
            raise PlanError(f"{name} must have {experts} experts in its first dimension, not {many}")
        if len(matrix) >= 2:
            linears[name_of_all] = Linear(name_of_all, *_sides(matrix), experts)
        elif not match[1] or int(match[1]) == 0:
            expert_vectors += prod(matrix)
    return LayerShape(tuple(linears.values()), vectors, experts, chosen if experts else 0, expert_vectors)


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and not name.endswith("bias")


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return int(shape[0]), prod(shape[1:])
