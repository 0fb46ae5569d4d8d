"""Evens out the channels between two convolutions before quantization, and writes `equalization.csv` here.

    uv run experiments/after_training/equalization.py /data/cifar10-jpeg

The zoo's ResNet-20 has such a pair in each block: a batch norm and a ReLU lie between them, and nothing else reads
them. Channel ``i`` is divided by ``s_i`` and its weights in the second convolution multiplied by it, which leaves the
function as it is. ``s_i = sqrt(max |x_i| / max |w_i|)`` makes both ranges their geometric mean (arXiv:1906.04721, with
measured ranges of inputs in place of the first convolution's weights).
"""

import argparse
import copy
from typing import Any

import torch
from run import HERE, NETWORK, SAMPLES, accuracy, pictures  # beside this file
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.data import ImageFolderDataModule
from qconv.environment import commit, machine
from qconv.models.resnet import BasicBlock
from qconv.table import write_csv

SCHEMES = {"W4A8": (4, 8), "W4A4": (4, 4)}


@torch.no_grad()
def equalized(network: nn.Module, images: Tensor) -> tuple[nn.Module, float]:
    """Return a copy whose blocks are equalized, and the largest ratio between two channels' ranges of inputs before."""
    network, widest = copy.deepcopy(network), 1.0
    for block in network.modules():
        if not isinstance(block, BasicBlock):
            continue
        seen: list[Tensor] = []
        hook = block.conv2.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        network(images)
        hook.remove()
        of_inputs = seen[0].abs().amax((0, 2, 3)).clamp(min=1e-6)
        scales = (of_inputs / block.conv2.weight.abs().amax((0, 2, 3)).clamp(min=1e-6)).sqrt()
        widest = max(widest, float(of_inputs.max() / of_inputs.min()))
        block.bn1.weight.div_(scales)
        block.bn1.bias.div_(scales)
        block.conv2.weight.mul_(scales.view(-1, 1, 1))
    return network, widest


def main(root: str) -> list[dict[str, Any]]:
    """Return a row for each number of bits, each range of weights, and each network, as it was and equalized."""
    of_commit = commit()
    data = ImageFolderDataModule(root, augment=(), seed=1)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    few, images, labels = pictures(data)
    network = qconv.to_float(qconv.load(NETWORK)).eval()
    other, widest = equalized(network, few)
    with torch.no_grad():
        difference = float((other(few) - network(few)).abs().max())
    print(f"ranges of channels differ by up to {widest:.1f} times; the float outputs by {difference:.1e}")
    rows: list[dict[str, Any]] = []
    for bits, (weight_bits, input_bits) in SCHEMES.items():
        for per_channel in (True, False):
            for equalization, each in (("", network), ("equalized", other)):
                scheme = schemes.minmax(weight_bits, input_bits, per_channel=per_channel)
                model = qconv.convert(copy.deepcopy(each), scheme)
                qconv.calibrate(model, [few])
                row = {"network": NETWORK, "bits": bits, "weight_ranges": "filter" if per_channel else "layer"}
                row |= {"equalization": equalization, "accuracy": accuracy(model, images, labels)}
                qconv.correct_bias(model, network, few, max_samples=SAMPLES)
                row["accuracy_bias_corrected"] = accuracy(model, images, labels)
                print(row, flush=True)
                rows.append({**row, **machine(), "torch": torch.__version__, "samples": SAMPLES, "commit": of_commit})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Equalize the channels of a network before it is quantized.")
    parser.add_argument("data", help="folder of the pictures, train/<class>/* and test/<class>/*")
    write_csv(main(parser.parse_args().data), HERE / "equalization.csv")
