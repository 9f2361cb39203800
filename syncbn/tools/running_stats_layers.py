"""Finds the layers of a model that have running statistics, and has all ranks agree that they have the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from syncbn.distributed import groups
from syncbn.distributed.text_exchange import require_equal

Layer = TypeVar("Layer", bound=_BatchNorm)


def layers_with_running_stats(model: nn.Module, layer_class: type[Layer]) -> list[Layer]:
    """The layers of this class that have running statistics. **Raises** ValueError for one that is lazy still."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, layer_class) and layer.track_running_stats and layer.running_mean is not None:
            if is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
            layers.append(layer)
    return layers


def running_stats(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    """running_mean and running_var of a layer that has them."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def agreed_layers(
    model: nn.Module, prepare: Callable[[list[_BatchNorm]], None] = lambda layers: None, count_given: str = ""
) -> list[_BatchNorm]:
    """The BatchNorm layers of `model` with running statistics: the same on all ranks, and so is `count_given`.

    **Raises** on every rank what any rank raises, also in `prepare`.
    """
    fault: Exception | None = None
    layers: list[_BatchNorm] = []
    try:
        layers = layers_with_running_stats(model, _BatchNorm)
        if not layers:
            raise ValueError("the model has no BatchNorm layer with running statistics")
        prepare(layers)
    except (TypeError, ValueError) as error:
        fault = error
    lines = [f"BatchNorm layer {index}: {layer.num_features} channels" for index, layer in enumerate(layers, 1)]
    require_equal([f"BatchNorm layers{count_given}", *lines], fault, groups.world())
    return layers
