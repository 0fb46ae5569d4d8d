"""What commit 32c3ff5 was run with to write these files: `python write.py FOLDER`. Later versions must read them."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes

SCHEMES = {
    "lsq": schemes.lsq(4, 4),
    "ttq": schemes.ttq(),
    "pact": schemes.pact(4, 4),
    "apot": schemes.apot(4, 4),
    "dsq": schemes.dsq(4, 4),
    "n2uq": schemes.n2uq(2, 2),
    "lsq_plus": schemes.lsq_plus(4, 4),
    "adabin": schemes.adabin(),
    "minmax": schemes.minmax(8, 8),
    "staged": schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))]),
    "inq": schemes.inq(5),
    "shift_ps": schemes.shift_ps(5),
    "bnn": schemes.bnn(),
    "irnet": schemes.irnet(),
    "recu": schemes.recu(),
    "reactnet": schemes.reactnet(),
    "xnorpp": schemes.xnorpp(),
}


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
        train_a_step(model, optimizer, images)
    return model.eval(), optimizer


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(4, 2, 8, 8)
    kept: dict[str, Any] = {"images": images}
    for name, scheme in SCHEMES.items():
        model, optimizer = trained(scheme, images)
        kept[name] = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "output": model(images).detach(),
        }
        qconv.save_packed(model, f"{sys.argv[1]}/{name}.safetensors")
    torch.save(kept, f"{sys.argv[1]}/checkpoints.pt")
