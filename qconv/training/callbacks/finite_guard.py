"""The callback that stops a run at the first NaN or inf, before it reaches a weight."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from ...layers import QuantizedLayer
from ...layers.naming import name_of
from .checkpoints import where_to_go_on

WATCHED = (QuantizedLayer, _ConvNd, nn.Linear)


class FiniteGuard(Callback):
    """Raises a FloatingPointError when the batch, a layer's input, the loss, a gradient or a parameter is not finite.

    The loss alone does not show it: a sign turns NaN into ±1, and the network trains on noise. So the input of every
    convolution, linear and quantized layer is summed in float32 (a sum of finite numbers that overflows counts as not
    finite). Once per step, before the optimizer acts, all sums are checked together, in one transfer from the device.
    Under 16-mixed precision gradients may overflow, and the gradient scaler skips such steps, so they are not checked
    there. The message names epoch, step, the first place, and the last checkpoint, which stays unchanged.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[str, Tensor]] = []
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the layers."""
        del trainer, stage
        for name, module in pl_module.named_modules():
            if isinstance(module, WATCHED):
                place = f"the input of {name_of(module, name.removeprefix('model.'))}"
                self.handles.append(module.register_forward_pre_hook(self._hook(place)))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        del trainer, pl_module, stage
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.sums.clear()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the pictures."""
        self._add("the input batch", batch[0])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check the loss."""
        self._add("the loss", loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the gradients and judge the step."""
        parameters = dict(pl_module.named_parameters())
        if trainer.precision != "16-mixed":
            self._add_norms("the gradient of", {k: p.grad for k, p in parameters.items() if p.grad is not None})
        self._add_norms("the parameter", parameters)
        self._judge(trainer, f"epoch {trainer.current_epoch}, step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the parameters after the last step, before they are saved."""
        self._add_norms("the parameter", dict(pl_module.named_parameters()))
        self._judge(trainer, f"epoch {trainer.current_epoch}, after step {trainer.global_step - 1}")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check the pictures."""
        self._add("the input batch", batch[0])

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
        self._judge(trainer, f"epoch {trainer.current_epoch}, validation batch {batch_idx}")

    on_test_batch_start = on_validation_batch_start

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Judge the batch."""
        self._judge(trainer, f"test batch {batch_idx}")

    def _hook(self, place: str):
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module
            if args and isinstance(args[0], Tensor):
                self._add(place, args[0])

        return hook

    def _add(self, place: str, tensor: Tensor) -> None:
        self.sums.append((place, tensor.detach().sum(dtype=torch.float32)))

    def _add_norms(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        values = (tensor.detach() for tensor in tensors.values())
        # The norm refuses to narrow float64.
        norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in values]
        self.sums += [(f"{what} '{name.removeprefix('model.')}'", n) for name, n in zip(tensors, norms, strict=True)]

    def _judge(self, trainer: Trainer, when: str) -> None:
        places, sums = zip(*self.sums, strict=True)
        self.sums.clear()
        finite = torch.stack([value.float() for value in sums]).isfinite()
        # All processes stop together: a remaining one would wait for the others forever.
        if trainer.strategy.reduce_boolean_decision(not bool(finite.all()), all=False):
            bad = [place for place, ok in zip(places, finite.tolist(), strict=True) if not ok]
            raise FloatingPointError(f"{when}: {explain(bad)}; {where_to_go_on(trainer)}")


def explain(bad: list[str]) -> str:
    """The first place, and the first layer if that is different."""
    if not bad:
        return "another process found NaN or inf"
    layer = next((place for place in bad if place.startswith("the input of layer")), None)
    through = f", read by {layer}" if layer is not None and layer != bad[0] else ""
    return f"NaN or inf in {bad[0]}{through}"
