"""The shape of a decoder from the names and shapes of its parameters: exact, whatever the family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nearflash.abi.errors import PlanError
from nearflash.planning.shapes import LayerShape, Linear, ModelShape

__all__ = ["ForwardPass", "LayerPass", "from_parameters"]


@dataclass(frozen=True)
class LayerPass:
    """A layer's pass of one token: elements of K and V that it keeps, and of how many tokens a later one sees them
    (None: all); its experts, and those that the token is routed to.
    """

    kv: int = 0
    window: int | None = None
    experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True)
class ForwardPass:
    """A model's pass of one token, by layer, and where its layers are. embedding, head: names of their matrices, one
    name where they are tied. The other numbers are those of ModelShape.
    """

    prefix: str
    layers: tuple[LayerPass, ...]
    embedding: str
    head: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    element_bytes: int


def from_parameters(parameters: Mapping[str, Sequence[int]], forward: ForwardPass) -> ModelShape:
    """The shape of a model with these parameters (by name, without tied ones twice) that computes so.

    Matrices outside the layers count as embedding, but for the head. Raises PlanError for experts in parameters that
    are not so many.
    """
    inside: list[dict[str, Sequence[int]]] = [{} for _ in forward.layers]
    outside: dict[str, Sequence[int]] = {}
    for name, shape in parameters.items():
        number, _, inner = name.removeprefix(f"{forward.prefix}.").partition(".")
        if name.startswith(f"{forward.prefix}.") and number.isdecimal():
            inside[int(number)][inner] = shape
        else:
            outside[name] = shape
    tables = {name: prod(shape) for name, shape in outside.items() if _is_matrix(name, shape)}
    tied = forward.head == forward.embedding
    head = prod(parameters[forward.head])
    return ModelShape(
        hidden=forward.hidden,
        heads=forward.heads,
        kv_heads=forward.kv_heads,
        head_dim=forward.head_dim,
        vocabulary=int(parameters[forward.embedding][0]),
        max_tokens=forward.max_tokens,
        layers=tuple(_layer(*layer) for layer in zip(inside, forward.layers, strict=True)),
        embedding=sum(tables.values()) - (0 if tied else head),
        head=head,
        tied=tied,
        vectors=sum(prod(shape) for name, shape in outside.items() if name not in tables),
        element_bytes=forward.element_bytes,
    )


def _layer(parameters: Mapping[str, Sequence[int]], layer: LayerPass) -> LayerShape:
    linears: dict[str, Linear] = {}
    vectors = expert_vectors = 0
    for name, shape in parameters.items():
        before, experts, inner = f".{name}".rpartition(".experts.")
        if not experts or not layer.experts:
            if _is_matrix(name, shape):
                linears[name] = Linear(name.replace("experts.", "expert."), *_sides(shape))
            else:
                vectors += prod(shape)
            continue
        # A tensor each, or one of all.
        number, _, of_one = inner.partition(".")
        one = shape if number.isdecimal() else _shape_of_one(name, shape, layer.experts)
        name_of_all = f"{before}{experts}{of_one if number.isdecimal() else inner}".removeprefix(".")
        if len(one) >= 2:
            linears[name_of_all] = Linear(name_of_all, *_sides(one), layer.experts)
        elif not number.isdecimal() or int(number) == 0:
            expert_vectors += prod(one)
    return LayerShape(tuple(linears.values()), vectors, layer.experts, layer.experts_per_token, expert_vectors,
                      layer.kv, layer.window)  # fmt: skip


def _shape_of_one(name: str, shape: Sequence[int], experts: int) -> Sequence[int]:
    """The shape of one in a tensor of all experts: its first dimension counts them, or they lie below each other."""
    if shape and shape[0] == experts:
        return shape[1:]
    if len(shape) == 2 and shape[0] % experts == 0:
        return (shape[0] // experts, shape[1])
    raise PlanError(f"{name} must have {experts} experts in its first dimension, not {shape[0] if shape else 'none'}")


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and not name.endswith("bias")


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return int(shape[0]), prod(shape[1:])
