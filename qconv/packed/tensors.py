"""The tensors of a model by name, and their allowed values, for writing and reading."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..ground.checks import check_module
from ..quantizers.part import Part


def joined(name: str, rest: str) -> str:
    """The name of `rest` in the module `name`, which is "" for the model itself."""
    return f"{name}.{rest}" if name else rest


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model without wrappers that compile it or distribute it over devices."""
    check_module(model)
    while True:
        inside = getattr(model, "_orig_mod", None)
        if type(model).__name__ == "_FabricModule":
            inside = model.module
        if inside is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by all their names."""
    names = model.state_dict().keys()
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every if name in names}


def counters(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of batch norms' counts of training batches, which evaluation does not use."""
    return {joined(name, "num_batches_tracked") for name, module in modules.items() if isinstance(module, _NormBase)}


def check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless parameters and batch norm statistics are finite, variances and quantizers valid."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, Part):
            module.check_state(tensors, joined(name, ""))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        owner, _, key = name.rpartition(".")
        is_norm = isinstance(modules.get(owner), _NormBase)
        if tensor.isnan().any() or ((name in parameters or is_norm) and not tensor.isfinite().all()):
            raise ValueError(f"'{name}' has NaN or inf")
        if is_norm and key == "running_var" and (tensor < 0).any():
            raise ValueError(f"'{name}' (={tensor.min().item()}) must not be negative")
