"""Shapes of the models that explore knows: decoders by their configuration, trained models by their parameters."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from nearflash.abi.errors import PlanError
from nearflash.explore.tables import own_tables, table
from nearflash.planning.shapes import LayerShape, ModelShape, from_config

__all__ = ["Decoder", "Trained", "decoder", "find_trained", "list_trained"]


@dataclass(frozen=True)
class Decoder:
    """A decoder as one token of decode sees it; numbers are elements. All layers are alike.

    qkv, out, ffn: weights of one layer that a token multiplies with; of experts, those it is routed to. inputs: the
    longest chain of input vectors of a layer's four dependent matrix products, and outputs what they give.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv: int
    out: int
    ffn: int
    inputs: int
    outputs: int
    layer_parameters: int
    parameters: int
    head: int

    @property
    def kv(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def active(self) -> int:
        """Weights that one token multiplies with, in all layers and for its logits."""
        return self.layers * (self.qkv + self.out + self.ffn) + self.head


@cache
def shape(name: str) -> ModelShape:
    """The planner's shape of a decoder. Raises PlanError for a name that is not there."""
    tables = own_tables(".", "models.toml")
    if name not in tables:
        raise PlanError(f"model must be one of {', '.join(sorted(tables))}, not {name!r}")
    return from_config({key: value for key, value in tables[name].items() if key != "source"})


@cache
def decoder(name: str) -> Decoder:
    """A decoder by its name. Raises PlanError for a name that is not there."""
    model = shape(name)
    layer = model.layers[0]
    sizes = {linear.name: linear for linear in layer.linears}
    qkv = sum(sizes[f"attention.{part}"].parameters for part in "qkv")
    out = sizes["attention.o"].parameters
    down = next(linear for key, linear in sizes.items() if key.endswith("down"))
    routed = layer.experts_per_token or 1
    return Decoder(
        name=name,
        layers=len(model.layers),
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        qkv=qkv,
        out=out,
        ffn=layer.active_parameters - layer.vectors - qkv - out,
        inputs=2 * model.hidden + model.heads * model.head_dim + down.columns * routed,
        outputs=(model.heads + 2 * model.kv_heads) * model.head_dim + model.hidden + _ffn_outputs(layer, routed),
        layer_parameters=layer.parameters,
        parameters=model.parameters,
        head=model.head,
    )


def _ffn_outputs(layer: LayerShape, routed: int) -> int:
    inner = [linear for linear in layer.linears if "mlp" in linear.name and not linear.name.endswith("router")]
    return routed * sum(linear.rows for linear in inner)


@dataclass(frozen=True)
class Trained:
    """A model in training."""

    FILE: ClassVar[str] = "trained"
    source: str
    parameters_count: int


def list_trained() -> list[str]:
    """Names of the trained models, smallest first."""
    tables = own_tables(".", "trained.toml")
    return sorted(tables, key=lambda name: tables[name]["parameters_count"])


def find_trained(name: str) -> Trained:
    """A trained model by its name. Raises PlanError for a name that is not there."""
    tables = own_tables(".", "trained.toml")
    if name not in tables:
        raise PlanError(f"model must be one of {', '.join(list_trained())}, not {name!r}")
    return table(Trained, tables[name], name)
