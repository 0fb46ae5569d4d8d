"""Bop: binary weights without latent ones (arXiv:1906.02107)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from ..quantizers import sign
from .groups import Options


class Bop(Optimizer):
    r"""Flips binary weights (Helwegen et al., arXiv:1906.02107, algorithm 1), and trains all others with Adam.

    Groups with ``binary=True`` hold weights that are ±1, without latent weights behind them. With the gradient g and
    its moving average m, which starts at 0::

        m ← m + γ (g − m);    w ← −w  where |m| > threshold and sign(m) = sign(w)

    At ``|m| = threshold`` the weight stays; larq's ``Bop`` sets it to +1 there. A NaN in the gradient stays in m, and
    its weight is never flipped again. All other groups are trained by ``torch.optim.Adam``, bit for bit.

    **The learning rate of a binary group is γ**, so that learning-rate schedules act on it: the authors decay γ.
    ``gamma`` is used for binary groups without an ``lr``. ``threshold`` may differ between groups, too.

    The optimizer replaces the weights of binary groups by their signs (+1 for 0), in place, when it receives them.
    Weights of any size that are loaded later become their signs at the next optimizer step. The layers keep their
    quantizer: for a sign (``schemes.bnn``) the weight is the binary weight; with a scale (``schemes.bwn``) the scale of
    ±1 is 1. Clamping after the optimizer step changes nothing.

    Args:
        params: groups, at least one of them binary: ``parameter_groups(model, {"binary_weights": {"binary": True}})``.
        lr: learning rate of Adam.
        gamma: the adaptivity rate γ, 0 to 1.
        threshold: 0 or more.
        betas: Adam's betas.
        eps: Adam's eps.
        weight_decay: Adam's weight decay; a binary group must not have one.

    Raises:
        ValueError: a number out of its range, a weight decay for a binary group, or no binary group.
        TypeError: binary weights that are not float32 or float64 (16 bits can't resolve γ and the threshold), complex
            parameters, or, in ``step``, a sparse gradient.

    Example:
        >>> weight = nn.Parameter(torch.tensor([0.3, -0.2, 0.0]))
        >>> optimizer = Bop([{"params": [weight], "binary": True, "lr": 0.5}])
        >>> weight.grad = torch.tensor([1.0, 1.0, -1.0])
        >>> optimizer.step()
        >>> weight.tolist()
        [-1.0, -1.0, 1.0]
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        gamma: float = 1e-4,
        threshold: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        adam_options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "gamma": gamma, "threshold": threshold, "binary": False, **adam_options})
        if not any(group["binary"] for group in self.param_groups):
            raise ValueError(
                "params has no group with binary=True: "
                "use parameter_groups(model, {'binary_weights': {'binary': True}}), or use torch.optim.Adam"
            )

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; in a binary one the weights become their signs."""
        binary = param_group.get("binary", False)
        if "gamma" in param_group:
            raise ValueError(f"gamma (={param_group['gamma']}) of a group must be given as lr, where schedules find it")
        if binary and param_group.get("weight_decay"):
            decay = param_group["weight_decay"]
            raise ValueError(f"weight_decay (={decay}) of a binary group must be 0: ±1 has no size to decay")
        # γ and Adam's options stay in every group: schedules such as OneCycleLR expect the same keys in all.
        group = {"lr": self.defaults["gamma"], **param_group} if binary else dict(param_group)
        _check(self.defaults)
        _check({**self.defaults, **group})
        super().add_param_group(group)
        added: list[Tensor] = self.param_groups[-1]["params"]
        for parameter in added:
            if binary and parameter.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"binary weights must be float32 or float64, not {parameter.dtype}")
            if parameter.is_complex():
                raise TypeError(f"parameters must be real, not {parameter.dtype}")
        for parameter in added if binary else ():
            parameter.copy_(sign(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient; return the loss of ``closure``, which recomputes gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, [parameter for parameter in group["params"] if parameter.grad is not None])
            for group in self.param_groups
        ]
        for _, parameters in work:
            for parameter in parameters:
                if parameter.grad.layout is not torch.strided:
                    shape = tuple(parameter.shape)
                    raise TypeError(
                        f"the gradient of a parameter of shape {shape} must be dense: Bop supports no sparse gradients"
                    )
        for group, parameters in work:
            (self._flip if group["binary"] else self._adam)(group, parameters)
        return loss

    def _flip(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for weight in parameters:
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            momentum = state["momentum"].lerp_(weight.grad, float(group["lr"]))
            signs = sign(weight)
            flipped = signs * momentum > group["threshold"]  # exact: ±m, which is |m| if the signs agree
            weight.copy_(torch.where(flipped, -signs, signs))

    def _adam(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                wide = torch.promote_types(torch.get_default_dtype(), torch.float32)  # in 16 bits it would stop growing
                state["step"] = torch.zeros((), dtype=wide)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check(options: Options) -> None:
    for name in ("lr", "gamma", "threshold", "eps", "weight_decay"):
        if not options[name] >= 0:
            raise ValueError(f"{name} (={options[name]}) must be 0 or more")
    if not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError(f"betas (={options['betas']}) must be at least 0 and less than 1")
    if options["gamma"] > 1:
        raise ValueError(f"gamma (={options['gamma']}) must be at most 1")
    if options["binary"] and options["lr"] > 1:
        raise ValueError(f"lr (={options['lr']}), the gamma of a binary group, must be at most 1")
