"""The callback that examines the quantized layers once per epoch: `diagnostics.csv` and `diagnostics.png`."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from ...ground.files import atomic_file
from ...ground.table import write_csv
from ...layers import QuantizedLayer
from ...layers.twins import quantized_layers
from ...loop.optimizer_step import innermost
from ...optim.oscillations import FREQUENCY, FROZEN, OFTEN
from ...quantizers import INQ

FIGURES = {
    "flip_rate": "weights that changed their level in the epoch, %",
    "weights_never_flipped": "weights that never changed their level, %",
    "weights_oscillating": "weights that have oscillated in more than 1 of 200 steps, %",
    "weights_frozen": "weights frozen because they oscillated, %",
    "weights_saturated": "weights without gradient, %",
    "inputs_saturated": "inputs without gradient, %",
    "inputs_dead": "input channels of one value, %",
    "weight_error": "quantization error of the weight at the best scale, % of its energy",
    "input_error": "quantization error of the input at the best scale, % of its energy",
}
"""The measured figures, shares from 0 to 1; `step`, the mean scale of the weight's codes, has no common axis."""


class Diagnostics(Callback):
    """Measures every quantized layer at the end of each epoch, on the weights and on one validation batch.

    A row has epoch, layer, the `FIGURES`, and `step`, the mean scale of the weight's codes if there are codes. An
    element has no gradient if its quantizer's pseudo-gradient of a gradient of ones is 0. With a logger, the figures
    also go there as `<figure>/<layer>`. A warning names layers that no longer learn: none of their weights, or of the
    inputs seen, has a gradient. It runs only in the first process.

    Args:
        folder: folder of the two files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.rows: list[dict[str, Any]] = []
        self.levels: dict[str, Tensor] = {}
        self.flipped: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.of_inputs: dict[str, dict[str, float]] = {}
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.within_epoch = False
        self.resumed: dict[str, Tensor] = {}
        self.told: set[tuple[str, str]] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the levels at the start."""
        if trainer.is_global_zero:
            self.levels = {name: levels_of(layer) for name, layer in layers_of(pl_module)}
            for name, levels in self.resumed.items():
                self.levels[name] = levels.to(self.levels[name].device)
            for name, levels in self.levels.items():  # a resumed run has them
                self.flipped.setdefault(name, torch.zeros_like(levels, dtype=torch.bool))
                self.flipped[name] = self.flipped[name].to(levels.device)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the layers' inputs of the first batch."""
        if batch_idx == 0 and self.levels and not trainer.sanity_checking:
            torch.compiler.set_stance("force_eager")  # hooks would make the network compile once more
            for name, layer in layers_of(pl_module):
                self.handles.append(layer.register_forward_pre_hook(self._hook(name)))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Examine the inputs by the quantizers that were validated, which may be averages of those in training."""
        if self.handles:
            self.of_inputs = {name: of_input(layer, self.inputs.get(name)) for name, layer in layers_of(pl_module)}
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop recording if the batch failed."""
        self._stop()

    def _stop(self) -> None:
        if self.handles:
            torch.compiler.set_stance("default")
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.inputs.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the levels at the start of the epoch from now on."""
        self.within_epoch = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a row for each layer."""
        self.within_epoch = False
        for name, layer in layers_of(pl_module) if self.levels else ():
            levels = levels_of(layer)
            changed = levels != self.levels[name]
            self.flipped[name] |= changed
            self.levels[name] = levels
            row = {
                "flip_rate": share(changed),
                "weights_never_flipped": share(~self.flipped[name]),
                **of_weight(layer),
                **of_steps(layer, trainer.optimizers),
                **self.of_inputs.pop(name, {}),
            }
            self.rows.append({"epoch": trainer.current_epoch, "layer": name, **row})
            for logger in trainer.loggers:
                logger.log_metrics({f"{key}/{name}": value for key, value in row.items()}, trainer.global_step)
        if self.rows and trainer.is_global_zero:
            self._tell_of_stopped(trainer.current_epoch, dict(layers_of(pl_module)))
            write_csv(self.rows, self.folder / "diagnostics.csv")

    def _tell_of_stopped(self, epoch: int, layers: dict[str, QuantizedLayer]) -> None:
        rows = [row for row in self.rows if row["epoch"] == epoch and layers[row["layer"]].is_trained]
        for figure, part in (("weights_saturated", "weights"), ("inputs_saturated", "inputs")):
            names = [row["layer"] for row in rows if row.get(figure) == 1 and (figure, row["layer"]) not in self.told]
            if figure == "weights_saturated":  # INQ freezes them
                names = [name for name in names if not isinstance(layers[name].weight_quantizer.at_work, INQ)]
            self.told |= {(figure, name) for name in names}
            if names:
                shown = ", ".join(f"'{name}'" for name in names[:3]) + (
                    f" and {len(names) - 3} more" if names[3:] else ""
                )
                warnings.warn(
                    f"epoch {epoch}: no gradient passes the {part} of {shown}: all lie beyond the quantizer's range. "
                    "If a learned range has left them, give quantizers a hundredth of the learning rate, such as "
                    "++optimizer.rules.quantizers.lr_scale=0.01",
                    stacklevel=2,
                )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the figure."""
        if self.rows and trainer.is_global_zero:
            draw_diagnostics(self.rows, self.folder / "diagnostics.png")

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, the weights that changed their level, and the levels at the start of the epoch."""
        levels = self.levels if self.within_epoch else {}
        return {"rows": self.rows, "flipped": self.flipped, "levels": levels}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rows, self.flipped = list(state_dict["rows"]), dict(state_dict["flipped"])
        self.resumed = dict(state_dict["levels"])

    def _hook(self, name: str):
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module
            self.inputs[name] = args[0].detach()

        return hook


def layers_of(module: nn.Module) -> list[tuple[str, QuantizedLayer]]:
    """The quantized layers by their names in the network."""
    return [(name.removeprefix("model."), layer) for name, layer in quantized_layers(module).items()]


@torch.no_grad()
def levels_of(layer: QuantizedLayer) -> Tensor:
    """Return the level of each weight: its code, or the quantized weight if there are no codes."""
    try:
        return layer.from_filters(layer.weight_codes().values)
    except TypeError:
        return layer.quantized_weight().clone()  # it may be the weight itself


@torch.no_grad()
def of_weight(layer: QuantizedLayer) -> dict[str, float]:
    """Saturation, error and step of a weight."""
    figures: dict[str, float] = {}
    if not layer.weight_quantizer.replaces_weight:
        with layer.as_evaluated() as (quantizer, filters):
            grad = quantizer.backward(torch.ones_like(filters), filters, *quantizer.tensors())[0]
            figures["weights_saturated"] = share(grad == 0) if grad is not None else 0.0
            figures["weight_error"] = error(layer.quantized_weight(), layer.weight)
    with contextlib.suppress(TypeError):  # real numbers have no codes
        figures["step"] = float(layer.weight_codes().scale.float().mean())
    return figures


def of_steps(layer: QuantizedLayer, optimizers: list[Optimizer]) -> dict[str, float]:
    """Figures of the weight from `qconv.optim.Oscillations`, if the run has this rule."""
    figures: dict[str, float] = {}
    for optimizer in map(innermost, optimizers):
        state = optimizer.state.get(layer.weight, {})
        if FREQUENCY in state:
            figures["weights_oscillating"] = share(state[FREQUENCY] > OFTEN)
        if FROZEN in state:
            figures["weights_frozen"] = share(state[FROZEN] > 0)
    return figures


@torch.no_grad()
def of_input(layer: QuantizedLayer, input: Tensor | None) -> dict[str, float]:
    """Saturation, dead channels and error of the inputs that a layer has received."""
    if input is None or input.numel() == 0:
        return {}
    quantizer = layer.input_quantizer
    tensors = quantizer.tensors()
    input_q = quantizer.quantize(input, *tensors)
    grad = quantizer.backward(torch.ones_like(input), input, *tensors)[0]
    channels = input_q.movedim(layer.input_channels()[1], 0).flatten(1)
    return {
        "inputs_saturated": share(grad == 0) if grad is not None else 0.0,
        "inputs_dead": share((channels == channels[:, :1]).all(1)),
        "input_error": error(input_q, input),
    }


def share(flags: Tensor) -> float:
    """The share of elements that are True."""
    return float(flags.float().mean()) if flags.numel() else 0.0


def error(x_q: Tensor, x: Tensor) -> float:
    """``min_s ‖s·x_q − x‖² / ‖x‖² = 1 − cos²``, 0 if x is 0: the next batch norm cancels a wrong scale."""
    cosine = torch.nn.functional.cosine_similarity(x_q.flatten().float(), x.flatten().float(), dim=0)
    return float(1 - cosine.square()) if x.any() else 0.0


def draw_diagnostics(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each figure that is not 0 throughout as a map of layers by epochs into the PNG file `path`."""
    # The figure has its own Agg canvas: pyplot would choose a backend for the whole process and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(dict.fromkeys(row["layer"] for row in rows))
    epochs = sorted({row["epoch"] for row in rows})
    shown = [key for key in FIGURES if any(row.get(key, 0) > 0 for row in rows)]
    lines = max(1, -(-len(shown) // 2))
    size = min(7.0, 160 / len(layers))
    # Margins by hand, in inches: a layout that measures every label takes a third of the time or more.
    width, panel, gap, foot = 12.0, 0.35 + 0.14 * len(layers), 0.33, 0.5
    left = min(0.15 + 0.56 * size / 72 * max(map(len, layers)), width / 2)
    height = lines * (gap + panel) + foot
    figure = Figure(figsize=(width, height), dpi=120)
    canvas = FigureCanvasAgg(figure)
    places = figure.subplots(lines, 2, squeeze=False, sharex=True, sharey=True).flatten()
    figure.subplots_adjust(
        left=left / width, right=0.975, bottom=foot / height, top=1 - gap / height, wspace=0.1, hspace=gap / panel
    )
    for axes, key in zip(places, shown, strict=False):
        grid = torch.full((len(layers), len(epochs)), float("nan"))
        for row in rows:
            if key in row:
                grid[layers.index(row["layer"]), epochs.index(row["epoch"])] = 100 * row[key]
        extent = (epochs[0] - 0.5, epochs[-1] + 0.5, len(layers) - 0.5, -0.5)
        image = axes.imshow(grid.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, extent=extent)
        axes.set_title(FIGURES[key], loc="left", fontsize=9)
        axes.set_yticks(range(len(layers)), layers, fontsize=size)
        axes.tick_params(axis="x", labelsize=7)
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=7)
    for axes in places[len(shown) :]:
        axes.set_visible(False)
    for axes in places[max(0, len(shown) - 2) : len(shown)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("epoch", fontsize=8)
    with atomic_file(path) as file:
        canvas.print_png(file)
