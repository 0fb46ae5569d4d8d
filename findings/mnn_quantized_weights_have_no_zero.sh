#!/usr/bin/env bash
# MNN 3.6.1: with weightQuantBits, all zeros of a pruned or ternary filter become one number, up to half a step away.
#
# Expected: 0 is a code, as in ONNX, LiteRT and OpenVINO, so weights of 0 stay 0.
# Happens: codes count up from the smallest weight, a float. In a filter from -s to s, 0 lies between two codes, and its
# zeros become s / 255 off with 8 bits, s / 15 with 4, s / 3 with 2, all to the same side. Behind a ReLU these add up.
# --weightQuantAsymmetric=0 keeps zeros, but is not the default. Nothing is said.
# Seen, ternary weights, 80 % zeros, inputs from 0 to 1, float outputs up to 23.1 with standard deviation 6.3: a weight
# of 0 becomes -0.0039 with 8 bits, -0.067 with 4, 0.333 with 2; the mean of the outputs shifts by -0.9, -15.4, 76.8.
# With --weightQuantAsymmetric=0: 0, and no shift.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls, after installing packages of its own by pip
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

random = np.random.default_rng(0)
images = random.uniform(0, 1, (1, 64, 12, 12)).astype(np.float32)
weight = random.choice([-1, 0, 0, 0, 0, 0, 0, 0, 0, 1], (32, 64, 3, 3)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("Conv", ["x", "weight"], ["y"])],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, images.shape)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 10, 10])],
    [numpy_helper.from_array(weight, "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
onnx.save(model, "network.onnx")
wanted = onnxruntime.InferenceSession("network.onnx").run(None, {"x": images})[0]


def run(options, x):
    arguments = "mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network"
    _tools.mnnconvert([*arguments.split(), *options.split()])
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return np.array(network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read())


one = np.zeros_like(images)
one[0, 0, 5, 5] = 1
mirrored = weight[:, 0, ::-1, ::-1]
for bits, moved, shift in ((8, -1 / 255, -0.9), (4, -1 / 15, -15.4), (2, 1 / 3, 76.8)):
    for options, zero, mean in (("", moved, shift), (" --weightQuantAsymmetric=0", 0, 0)):
        options = f"--weightQuantBits {bits}{options}"
        stored = run(options, one)[0, :, 3:6, 3:6]
        error = (run(options, images) - wanted).mean()
        zeros = stored[mirrored == 0]
        print(f"RESULT {options}: 0 becomes {zeros.min():.4f}, outputs shift by {error:.1f}")
        assert np.allclose(stored, mirrored + zero * (mirrored == 0), rtol=0, atol=1e-4)
        assert abs(error - mean) < 0.06
assert wanted.std() < 7 and abs(wanted).max() < 24
END
sed -n 's/^RESULT //p' log
