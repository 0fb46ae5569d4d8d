"""The quantized layers of a model, and their twins in the float model."""

from collections.abc import Mapping

from torch import Tensor, nn

from .base import QuantizedLayer
from .naming import name_of


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}


def float_twins(layers: Mapping[str, QuantizedLayer], float_model: nn.Module) -> dict[str, nn.Module]:
    """Return the float layers by the names of the quantized ones.

    Raises:
        ValueError: ``float_model`` has quantized layers, lacks one of these layers, or has it on another device.
    """
    for name, layer in quantized_layers(float_model).items():
        raise ValueError(
            f"float_model has a quantized layer, {name_of(layer, name)}: pass the model before it was converted, or "
            "qconv.to_float of a copy"
        )
    modules = dict(float_model.named_modules())
    for name, layer in layers.items():
        weight = getattr(modules.get(name), "weight", None)
        size = tuple(weight.shape) if isinstance(weight, Tensor) else "absent"
        if size != tuple(layer.weight.shape):
            place = f"{name}.weight" if name else "weight"
            raise ValueError(
                f"float_model ({type(float_model).__name__}) must have the layers of model: {place!r} is {size} in it, "
                f"{tuple(layer.weight.shape)} in model; pass both without wrappers such as DistributedDataParallel, "
                "AveragedModel (.module) or what torch.compile returns (._orig_mod)"
            )
        if isinstance(weight, Tensor) and weight.device != layer.weight.device:
            raise ValueError(
                f"float_model (on {weight.device}) must be on the device of model ({layer.weight.device}): see {name!r}"
            )
    return {name: modules[name] for name in layers}
