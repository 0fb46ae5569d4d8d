"""Evens out the channels between two convolutions before quantization, and writes `equalization.csv` here.

    uv run experiments/after_training/equalization.py /data/cifar10-jpeg [NETWORK…]

Such a pair has a batch norm and a ReLU between them, and nothing else reads these: one in each block of a ResNet-20,
two in each of a MobileNetV2, whose ReLU6 become ReLUs first. Channel ``i`` is divided by ``s_i`` and its weights in the
second convolution multiplied by it, which leaves the function as it is. ``s_i = sqrt(max |x_i| / max |w_i|)`` makes
both ranges their geometric mean (arXiv:1906.04721, with measured ranges of inputs in place of the first convolution's
weights).
"""

import argparse
import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from run import HERE, NETWORK, SAMPLES, accuracy, pictures  # beside this file
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import InvertedResidual

import qconv
from qconv import schemes
from qconv.ground.environment import commit, machine
from qconv.ground.table import read_csv, write_csv
from qconv.models.resnet import BasicBlock

RESULTS = HERE / "equalization.csv"
SCHEMES = {"W4A8": (4, 8), "W4A4": (4, 4)}


class Pair(NamedTuple):
    """A batch norm, and the convolution that reads it through a ReLU."""

    norm: nn.BatchNorm2d
    conv: nn.Conv2d


def pairs(network: nn.Module) -> list[Pair]:
    """Return the pairs in the blocks of a network."""
    found: list[Pair] = []
    for block in network.modules():
        if isinstance(block, BasicBlock):
            found.append(Pair(block.bn1, block.conv2))
        elif isinstance(block, InvertedResidual):  # (convolution, norm, ReLU6) once or twice, convolution, norm
            steps: Any = [part for each in block.conv for part in (each if isinstance(each, nn.Sequential) else [each])]
            found += [Pair(steps[at - 2], steps[at]) for at in range(3, len(steps), 3)]
    return found


def without_bound(network: nn.Module) -> nn.Module:
    """Return a copy with ReLUs for ReLU6s: only without their bound a channel can be scaled."""
    network = copy.deepcopy(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU6):
            network.set_submodule(name, nn.ReLU())
    return network


@torch.no_grad()
def equalized(network: nn.Module, images: Tensor) -> tuple[nn.Module, float]:
    """Return a copy whose pairs are equalized, and the largest ratio between two channels' ranges of inputs before."""
    network, widest = copy.deepcopy(network), 1.0
    for norm, conv in pairs(network):
        seen: list[Tensor] = []
        hook = conv.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        network(images)
        hook.remove()
        of_inputs = seen[0].abs().amax((0, 2, 3)).clamp(min=1e-6)
        weight = conv.weight if conv.groups == 1 else conv.weight.transpose(0, 1)  # depthwise: one channel, one filter
        scales = (of_inputs / weight.abs().amax((0, 2, 3)).clamp(min=1e-6)).sqrt()
        widest = max(widest, float(of_inputs.max() / of_inputs.min()))
        norm.weight.div_(scales)
        norm.bias.div_(scales)
        weight.mul_(scales.view(-1, 1, 1))
    return network, widest


def main(root: str, source: str, of_commit: str | None) -> list[dict[str, Any]]:
    """Return a row for each number of bits, each range of weights, and each network, as it was and equalized."""
    name = Path(source).resolve().name  # that of the folder, if it is one
    few, images, labels = pictures(root)
    network = qconv.to_float(qconv.load(source)).eval()
    unbounded = without_bound(network)
    other, widest = equalized(unbounded, few)
    with torch.no_grad():
        difference = float((other(few) - unbounded(few)).abs().max())
    print(f"ranges of channels differ by up to {widest:.1f} times; the float outputs by {difference:.1e}")
    of_float = {"": network, "equalized": other}
    print({key or "as it was": accuracy(each, images, labels) for key, each in of_float.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for bits, (weight_bits, input_bits) in SCHEMES.items():
        for per_channel in (True, False):
            for equalization, each in of_float.items():
                scheme = schemes.minmax(weight_bits, input_bits, per_channel=per_channel)
                model = qconv.convert(copy.deepcopy(each), scheme)
                qconv.calibrate(model, [few])
                row = {"network": name, "bits": bits, "weight_ranges": "filter" if per_channel else "layer"}
                row |= {"equalization": equalization, "accuracy": accuracy(model, images, labels)}
                qconv.correct_bias(model, each, few, max_samples=SAMPLES)
                row["accuracy_bias_corrected"] = accuracy(model, images, labels)
                print(row, flush=True)
                rows.append({**row, **machine(), "torch": torch.__version__, "samples": SAMPLES, "commit": of_commit})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Equalize the channels of networks before they are quantized.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of the zoo, or folders; {NETWORK} by default")
    options = parser.parse_args()
    of_commit = commit()
    for source in options.networks or [NETWORK]:
        found = main(options.data, source, of_commit)
        write_csv([row for row in read_csv(RESULTS) if row["network"] != found[0]["network"]] + found, RESULTS)
