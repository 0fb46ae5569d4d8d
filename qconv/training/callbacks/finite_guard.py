"""The callback that stops a run at the first NaN or inf, before it reaches a weight, and warns of what leads there."""

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...ground.checks import some
from ...layers import QuantizedLayer
from ...layers.naming import name_of
from ...quantizers import Quantizer
from ...quantizers.numbers import SMALLEST
from ...quantizers.part import POSITIVE
from .checkpoints import where_to_go_on

WATCHED = (QuantizedLayer, _ConvNd, nn.Linear)


class FiniteGuard(Callback):
    """Raises a FloatingPointError when the batch, a layer's input, the loss, a gradient or a parameter is not finite.

    The loss alone does not show it: a sign turns NaN into ±1, and the network trains on noise. So the input of every
    convolution, linear and quantized layer is summed in float32 (a sum of finite numbers that overflows counts as not
    finite). Once per step, before the optimizer acts, all sums are checked together, in one transfer from the device.
    Under 16-mixed precision gradients may overflow, and the gradient scaler skips such steps, so they are not checked
    there. The message names epoch, step, the first place, and the last checkpoint, which stays unchanged.

    It also warns, once for each, of learned scales (LSQ's steps, PACT's alpha) that the optimizer has moved to their
    lower bound of 2^-20. What such a scale multiplies is almost zero, so the layer gives a constant, and gradients grow
    in the batch norms after it. Adam does that to a scale that is not much larger than its learning rate.
    """

    def __init__(self) -> None:
        self.scales: dict[str, tuple[Quantizer, str]] = {}
        self.fallen: list[str] = []
        self.sums: list[tuple[str, Tensor]] = []
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the layers."""
        for name, module in pl_module.named_modules():
            if isinstance(module, WATCHED):
                place = f"the input of {name_of(module, name.removeprefix('model.'))}"
                self.handles.append(module.register_forward_pre_hook(self._hook(place)))
        self.scales = learned_scales(pl_module)
        self.fallen = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.sums.clear()
        self.scales = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the images, or all tensors of a batch of another form."""
        self._add_batch(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check the loss."""
        self._add("the loss", loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the gradients and judge the step."""
        parameters = dict(pl_module.named_parameters())
        if trainer.precision != "16-mixed":
            self._add_norms("the gradient of", {k: p.grad for k, p in parameters.items() if p.grad is not None})
        self._add_norms("the parameter", parameters)
        self._judge(trainer, f"epoch {trainer.current_epoch}, step {trainer.global_step}", self._highest())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the parameters after the last step, before they are saved."""
        self._add_norms("the parameter", dict(pl_module.named_parameters()))
        when = f"epoch {trainer.current_epoch}, after step {trainer.global_step - 1}"
        self._judge(trainer, when, self._highest())

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check the images, or all tensors of a batch of another form."""
        self._add_batch(batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Judge the batch."""
        part = "test" if trainer.testing else f"epoch {trainer.current_epoch}, validation"
        self._judge(trainer, f"{part} batch {batch_idx}")

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def _hook(self, place: str):
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                self._add(place, args[0])

        return hook

    def _add_batch(self, batch: Any) -> None:
        batch = batch[0] if isinstance(batch, tuple | list) and batch else batch  # labels may be NaN
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._add("the input batch", tensor)

    def _add(self, place: str, tensor: Tensor) -> None:
        self.sums.append((place, tensor.detach().sum(dtype=torch.float32)))

    def _add_norms(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        values = [tensor.detach() for tensor in tensors.values()]
        dtypes = {torch.promote_types(value.dtype, torch.float32) for value in values}  # it refuses to narrow float64
        # On a GPU these are a few kernels, not one for each tensor.
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        norms = torch._foreach_norm(values, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
        self.sums += [(f"{what} '{name.removeprefix('model.')}'", n) for name, n in zip(tensors, norms, strict=True)]

    def unfinished(self, trainer: Trainer) -> str | None:
        """Return what was not finite in a step that an error has ended, or None.

        A lean layer, for one, computes its input again from signs, and of a NaN the sign is any.
        """
        bad = []
        with suppress(RuntimeError):  # a device that has failed gives no numbers
            bad = [place for place, value in self.sums if not math.isfinite(float(value))]
        self.sums.clear()
        if not bad:
            return None
        return f"epoch {trainer.current_epoch}, step {trainer.global_step}: {explain(bad)}; {where_to_go_on(trainer)}"

    def _highest(self) -> dict[str, Tensor]:
        """The largest element of each learned scale that is trained and has not fallen before."""
        scales = {
            name: getattr(quantizer, attribute)
            for name, (quantizer, attribute) in self.scales.items()
            if name not in self.fallen
        }
        trained = {name: scale for name, scale in scales.items() if scale is not None and scale.requires_grad}
        return {name: scale.detach().max() for name, scale in trained.items() if scale.numel()}

    def _judge(self, trainer: Trainer, when: str, highest: Mapping[str, Tensor] | None = None) -> None:
        highest = {} if highest is None else highest
        places, sums = [place for place, _ in self.sums], [value for _, value in self.sums]
        self.sums.clear()
        watched = [value.float() for value in (*sums, *highest.values())]
        values = torch.stack(watched).tolist() if watched else []
        finite = [math.isfinite(value) for value in values[: len(sums)]]
        now = [name for name, value in zip(highest, values[len(sums) :], strict=True) if value <= SMALLEST]
        self.fallen += now
        # All processes stop together: a remaining one would wait for the others forever.
        if trainer.strategy.reduce_boolean_decision(not all(finite), all=False):
            bad = [place for place, ok in zip(places, finite, strict=True) if not ok]
            cause = f"; {explain_fallen(self.fallen)}" if self.fallen else ""
            raise FloatingPointError(f"{when}: {explain(bad)}{cause}; {where_to_go_on(trainer)}")
        if now and trainer.is_global_zero:
            warnings.warn(f"{when}: {explain_fallen(now)}", stacklevel=2)


def learned_scales(model: nn.Module) -> dict[str, tuple[Quantizer, str]]:
    """The learned tensors that must be positive: their names, their quantizers and their names there."""
    return {
        f"{name}.{attribute}".removeprefix("model."): (module, attribute)
        for name, module in model.named_modules()
        if isinstance(module, Quantizer)
        for attribute, rule in module.rules().items()
        if rule is POSITIVE and attribute in module._parameters
    }


def explain_fallen(names: list[str]) -> str:
    """Which learned scales are at their lower bound, what follows, and what to do."""
    shown = some([f"'{name}'" for name in names], 3)
    return (
        f"at the lower bound of 2^-20, so its outputs are almost zero: the learned {shown}. If the optimizer's "
        "steps are too large for it, give quantizers a hundredth of the learning rate, such as "
        "++optimizer.rules.quantizers.lr_scale=0.01"
    )


def explain(bad: list[str]) -> str:
    """The first place, and the first layer if that is different."""
    if not bad:
        return "another process found NaN or inf"
    layer = next((place for place in bad if place.startswith("the input of layer")), None)
    through = f", read by {layer}" if layer is not None and layer != bad[0] else ""
    return f"NaN or inf in {bad[0]}{through}"
