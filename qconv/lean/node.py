"""Lean modules in graphs of `torch.fx`: they appear as their twins would."""

from typing import Any

from torch import fx, nn


def as_node(module: Any, input: fx.Proxy) -> Any:
    """Return a call of ``module`` as one node, as for torch's own modules, or the result of its twin's forward.

    A tracer treats only the modules of ``torch.nn`` as units, and would trace into this one.
    """
    tracer: Any = input.tracer
    twin: type[nn.Module] = module.float_type
    if tracer.root is module or not twin.__module__.startswith("torch.nn."):
        return twin.forward(module, input)
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})
