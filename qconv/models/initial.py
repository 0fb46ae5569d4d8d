"""Initial weights of a network."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def he_normal_(model: M) -> M:
    """Initialize the weights of convolutions and linear layers: ``w ~ N(0, 2 / n)``.

    n is the number of inputs of an output, C_in / groups · kernel size. He et al. 2015 (arXiv:1502.01852), equation 10;
    as `torch.nn.init.kaiming_normal_`. torch's own start is uniform with a deviation of ``1 / sqrt(3 n)``, 0.41 of it.
    Biases, normalizations, and transposed and deformable convolutions stay as they are.

    Args:
        model: a network, float or quantized; its weights are changed in place.

    Returns:
        The model.

    Raises:
        ValueError: a layer computes its weight (`torch.nn.utils.parametrize`).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> round(he_normal_(nn.Linear(200, 500)).weight.std().item(), 2)
        0.1
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    for name, layer in layers.items():
        if "weight" not in layer._parameters:
            which = f"layer '{name}' ({type(layer).__name__})" if name else type(layer).__name__
            raise ValueError(f"{which} computes its weight: call he_normal_ before it does")
    for layer in layers.values():
        nn.init.kaiming_normal_(layer.weight)
    return model
