"""Writes what every method saves: `python write.py FILE`. Later versions must read it, and give what it gave."""

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qconv
from qconv import Scheme


def float_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    qconv.after_every_step(optimizer, model)
    return optimizer


def train_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()


def trained(scheme: Scheme, images: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = qconv.convert(float_network(), scheme)
    qconv.set_progress(model, 0.0)
    optimizer = optimizer_of(model)
    for step in range(3):
        if step == 2:
            qconv.set_progress(model, 1.0)
        train_a_step(model.train(), optimizer, images)
    return model.eval(), optimizer


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))
    from methods import METHODS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(4, 2, 8, 8)
    kept: dict[str, Any] = {"images": images}
    for name, scheme in METHODS.items():
        model, optimizer = trained(scheme, images)
        own: dict[str, Any] = {"model": copy.deepcopy(model.state_dict()), "output": model(images).detach()}
        own["optimizer"] = copy.deepcopy(optimizer.state_dict())
        with tempfile.TemporaryDirectory() as folder:
            qconv.save_packed(model, f"{folder}/packed")
            own["packed"] = (Path(folder) / "packed").read_bytes()
        train_a_step(model.train(), optimizer, images)
        kept[name] = {**own, "next": model.eval()(images).detach()}
    torch.save(kept, sys.argv[1])
