#!/usr/bin/env bash
# coremltools 9.0: an exported torch.sub(x, y, alpha=0.5) becomes x - y; instance norm forgets its running statistics.
#
# Expected: PyTorch's numbers, or the error that the converter gives for alpha in a traced network: "does not support
# scale factor param".
# Happens: torch.export hands alpha over by its name, and the converter looks only at arguments without names. So a
# step of a moving average or of an optimizer in a network, such as x.add_(y, alpha=0.1), is ten times too large.
# InstanceNorm2d(track_running_stats=True) normalizes in eval() with stored means and variances; the converter reads
# neither, in traced and in exported networks, and takes those of the picture. Nothing is said.
# Seen, for x = 1 and y = 8, PyTorch and converter: add with alpha=0.5 5 and 9, sub -3 and -7, x.add_(y, alpha=0.5) 5
# and 9, rsub with alpha=0.5 7.5 and 7. Instance norm with means 0 and variances 1, of pixels 1, 2, 3, 4: 1 2 3 4 and
# -1.34 -0.45 0.45 1.34.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python coremltools==9.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import coremltools
import numpy
import torch


class Network(torch.nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, x, y):
        return self.formula(x, y)


def graph(network, inputs, traced=False):
    options = {}
    if traced:
        program = torch.jit.trace(network, inputs)
        options["inputs"] = [coremltools.TensorType(shape=numbers.shape) for numbers in inputs]
    else:
        program = torch.export.export(network, inputs).run_decompositions({})
    function = coremltools.convert(
        program, convert_to="milinternal", compute_precision=coremltools.precision.FLOAT32, **options
    ).functions["main"]
    return [step for step in function.operations if step.op_type != "const"]


pair = torch.ones(2), torch.full((2,), 8.0)
for name, formula, wanted, found in (
    ("add, alpha=0.5", lambda x, y: torch.add(x, y, alpha=0.5), 5, 9),
    ("sub, alpha=0.5", lambda x, y: torch.sub(x, y, alpha=0.5), -3, -7),
    ("x.add_(y, alpha=0.5)", lambda x, y: x.clone().add_(y, alpha=0.5), 5, 9),
    ("rsub, alpha=0.5", lambda x, y: torch.rsub(x, y, alpha=0.5), 7.5, 7),
    ("add of a product", lambda x, y: torch.add(x, 0.5 * y), 5, 5),
):
    network = Network(formula).eval()
    exact = float(network(*pair)[0])
    values = {"x": 1.0, "y": 8.0}
    steps = graph(network, pair)
    for step in steps:
        a, b = (values[v.name] if v.val is None else float(v.val) for v in (step.inputs["x"], step.inputs["y"]))
        values[step.outputs[0].name] = {"add": a + b, "sub": a - b, "mul": a * b}[step.op_type]
    print(f"{name}: PyTorch {exact}, converter {values[steps[-1].outputs[0].name]}")
    assert exact == wanted and values[steps[-1].outputs[0].name] == found
    if "alpha" in name:
        try:
            graph(network, pair, traced=True)
        except ValueError as refusal:
            assert "scale factor" in str(refusal)
        else:
            raise SystemExit("a traced alpha is accepted")
picture = torch.arange(1.0, 5).reshape(1, 1, 2, 2)
network = torch.nn.InstanceNorm2d(1, track_running_stats=True).eval()
with torch.no_grad():
    print("instance norm in PyTorch:", network(picture).flatten().tolist())
    assert numpy.allclose(network(picture), picture, atol=1e-4)
for traced in (False, True):
    steps = graph(network, (picture,), traced)
    print("in Core ML:", [(step.op_type, sorted(step.inputs)) for step in steps])
    assert len(steps) == 1 and steps[0].op_type == "instance_norm"  # by its definition, of the picture's own statistics
    assert not {"mean", "variance", "running_mean", "running_var"} & set(steps[0].inputs)
END
