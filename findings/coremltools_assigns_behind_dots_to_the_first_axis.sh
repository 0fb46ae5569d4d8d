#!/usr/bin/env bash
# coremltools 9.0: of a traced network, y[..., 0] = 0 clears y[0], the first picture, and y[:, [0, 2]] = 0 does nothing.
#
# Expected: PyTorch's numbers, or an error, as for some other ways to write into a part of a tensor.
# Happens: the converter takes the axes of an assignment from the order of its slices, not from the axes that the trace
# names. A "..." leaves no slices, so what follows it counts from the first axis. Lists as indices, and methods that
# change a part in place, such as y[:, 0].clamp_(0, 1), are dropped. The sizes are right, and nothing is said. Heads of
# detectors and masks are written so. With torch.export the list is refused, and all others are right.
# Seen, for ones of 3 x 3 x 3, as sum of what is left at index 0 of each axis; PyTorch, converter: y[:, :, 0] = 0: 6 6 0
# both; y[..., 0] = 0: 6 6 0, 0 6 6; y[..., 0:1] = 0: 6 6 0, 0 6 6; y[:, [0, 2]] = 0: 3 0 3, 9 9 9; y[:, 0].mul_(0):
# 6 0 6, 9 9 9. Set to iOS 15 or 16, it drops the last two, too.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python coremltools==9.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import coremltools
import torch
from coremltools.converters.mil.mil import Builder, Function


def plain(y):
    y[:, :, 0] = 0.0


def dots(y):
    y[..., 0] = 0.0


def dots_and_slice(y):
    y[..., 0:1] = 0.0


def list_of_indices(y):
    y[:, [0, 2]] = 0.0


def method(y):
    y[:, 0].mul_(0.0)


class Network(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = x * 1.0
        self.change(y)
        return y


def evaluate(function, numbers):  # each operator of the graph, by the converter's own folding of constants
    known = {name: numbers for name in function.inputs}
    for step in function.operations:
        if step.op_type == "const":
            continue
        inputs = {
            name: known.get(value.name, value.val) for name, value in step.inputs.items() if value is not None
        }
        with Function({}, opset_version=coremltools.target.iOS18):
            known[step.outputs[0].name] = getattr(Builder, step.op_type)(**inputs).val
    return known[function.outputs[0].name]


def left(y):
    return [int(y[0].sum()), int(y[:, 0].sum()), int(y[:, :, 0].sum())]


ones = torch.ones(3, 3, 3)
for change, wanted, found in (
    (plain, [6, 6, 0], [6, 6, 0]),
    (dots, [6, 6, 0], [0, 6, 6]),
    (dots_and_slice, [6, 6, 0], [0, 6, 6]),
    (list_of_indices, [3, 0, 3], [9, 9, 9]),
    (method, [6, 0, 6], [9, 9, 9]),
):
    network = Network(change).eval()
    traced = torch.jit.trace(network, ones)
    assert left(network(ones)) == left(traced(ones)) == wanted
    exported = torch.export.export(network, (ones,)).run_decompositions({})
    sums = []
    for program, options in ((traced, {"inputs": [coremltools.TensorType(shape=ones.shape)]}), (exported, {})):
        try:
            converted = coremltools.convert(
                program,
                convert_to="milinternal",
                compute_precision=coremltools.precision.FLOAT32,
                minimum_deployment_target=coremltools.target.iOS18,
                **options,
            )
            sums.append(left(evaluate(converted.functions["main"], ones.numpy())))
        except NotImplementedError:
            sums.append("refused")
    print(f"{change.__name__}: PyTorch {wanted}, traced and converted {sums[0]}, exported and converted {sums[1]}")
    assert sums == [found, "refused" if change is list_of_indices else wanted]
END
