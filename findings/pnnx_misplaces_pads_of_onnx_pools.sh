#!/usr/bin/env bash
# pnnx 20261020: of an ONNX file, pools with SAME_UPPER or unequal pads move by a pixel or grow; Shrink drops lambd.
#
# Expected: for 8 pixels, a 3 x 3 window and stride 2, SAME_UPPER pads one pixel behind the picture, SAME_LOWER one
# before; averages divide by pixels unless count_include_pad is set; SpaceToDepth puts the channels of the first pixel
# of a block first; Shrink gives 0 from -lambd to lambd.
# Happens: ncnn gives for SAME_UPPER the maxima of SAME_LOWER. Averages of both are those of SAME_LOWER with the padding
# counted. Pads of 1 before and 0 behind become 1 on both sides, so that the picture is larger. SpaceToDepth has the
# order of PyTorch's pixel_unshuffle, and each Shrink has lambd 0.5 and no bias. Nothing is said, and ncnn's own Shrink
# is right.
# Seen, 1 x 4 x 8 x 8 numbers: SAME_UPPER: 67 % of the maxima and all averages are wrong, SAME_LOWER: no maxima and 44 %
# of the averages; pads 1 1 0 0: 5 x 5 maxima in place of 4 x 4; SpaceToDepth: 75 % are wrong; Shrink: all. Without
# auto_pad, with equal pads or 0 0 1 1, and DepthToSpace with mode CRD: none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ncnn==1.0.20261020 pnnx==20261020 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
export PATH="$PWD/environment/bin:$PATH" OMP_NUM_THREADS=1
environment/bin/python - >output 2>errors <<'END' || { cat output errors; exit 1; }
import subprocess

import ncnn
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

x = -np.random.default_rng(0).uniform(0.5, 1.5, (1, 4, 8, 8)).astype(np.float32)
pool = {"kernel_shape": [3, 3], "strides": [2, 2]}
cases = {
    "MaxPool, pads 1 1 1 1": ("MaxPool", {"pads": [1, 1, 1, 1]} | pool),
    "MaxPool, pads 0 0 1 1": ("MaxPool", {"pads": [0, 0, 1, 1]} | pool),
    "MaxPool, pads 1 1 0 0": ("MaxPool", {"pads": [1, 1, 0, 0]} | pool),
    "MaxPool, SAME_LOWER": ("MaxPool", {"auto_pad": "SAME_LOWER"} | pool),
    "MaxPool, SAME_UPPER": ("MaxPool", {"auto_pad": "SAME_UPPER"} | pool),
    "AveragePool, pads 1 1 1 1": ("AveragePool", {"pads": [1, 1, 1, 1]} | pool),
    "AveragePool, SAME_LOWER": ("AveragePool", {"auto_pad": "SAME_LOWER"} | pool),
    "AveragePool, SAME_UPPER": ("AveragePool", {"auto_pad": "SAME_UPPER"} | pool),
    "DepthToSpace": ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}),
    "SpaceToDepth": ("SpaceToDepth", {"blocksize": 2}),
    "Shrink": ("Shrink", {"lambd": 0.9, "bias": 0.3}),
}
nodes = []
for i, (operator, options) in enumerate(cases.values()):
    nodes.append(helper.make_node(operator, ["x"], [f"y{i}"], **options))
ends = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes]
graph = helper.make_graph(nodes, "graph", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)], ends)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
del model.graph.output[:]
for node, numbers in zip(nodes, right):
    model.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, numbers.shape))
onnx.save(model, "network.onnx")
subprocess.run(["pnnx", "network.onnx", "inputshape=[1,4,8,8]f32", "fp16=0"], check=True)
network = ncnn.Net()
network.opt.num_threads = 1
assert network.load_param("network.ncnn.param") == 0 and network.load_model("network.ncnn.bin") == 0
found = {}
for i, (name, wanted) in enumerate(zip(cases, right)):
    extractor = network.create_extractor()
    extractor.input("in0", ncnn.Mat(x[0]).clone())
    numbers = found[name] = np.array(extractor.extract(f"out{i}")[1])[None]
    if numbers.shape != wanted.shape:
        print(f"seen: {name}: shape {numbers.shape} in place of {wanted.shape}")
        assert name == "MaxPool, pads 1 1 0 0"
        continue
    wrong = np.mean(~np.isclose(numbers, wanted, atol=1e-4))
    print(f"seen: {name}: {wrong:.0%} of the numbers are wrong")
    fine = name.endswith(("1 1 1 1", "0 0 1 1", "DepthToSpace")) or name == "MaxPool, SAME_LOWER"
    assert wrong == 0 if fine else wrong > 0.3


def windows(before, behind, value):
    padded = np.pad(x, ((0, 0), (0, 0), (before, behind), (before, behind)), constant_values=value)
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]


right = dict(zip(cases, right))
assert np.allclose(right["MaxPool, SAME_UPPER"], windows(0, 1, -9).max((-1, -2)))
assert np.allclose(found["MaxPool, SAME_UPPER"], windows(1, 0, -9).max((-1, -2)))
assert np.allclose(found["AveragePool, SAME_LOWER"], windows(1, 0, 0).mean((-1, -2)), atol=1e-5)
assert np.allclose(found["AveragePool, SAME_UPPER"], windows(1, 0, 0).mean((-1, -2)), atol=1e-5)
assert found["MaxPool, pads 1 1 0 0"].shape == (1, 4, 5, 5)
blocks = x.reshape(1, 4, 4, 2, 4, 2)
assert np.array_equal(right["SpaceToDepth"], blocks.transpose(0, 3, 5, 1, 2, 4).reshape(1, 16, 4, 4))
assert np.array_equal(found["SpaceToDepth"], blocks.transpose(0, 1, 3, 5, 2, 4).reshape(1, 16, 4, 4))
assert np.array_equal(found["Shrink"], x)
END
grep '^seen' output
