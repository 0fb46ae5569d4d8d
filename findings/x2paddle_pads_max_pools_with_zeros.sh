#!/usr/bin/env bash
# x2paddle 1.6.0: a MaxPool of an ONNX file whose pads are unequal pads zeros, and Pad drops its value.
#
# Expected: the maxima of the pixels in a window, so that of negative numbers the largest is negative; Pad with the
# value that the file has, here 0.5, as quantizers and black borders of normalized pictures need it.
# Happens: pads that are equal on opposite sides, and auto_pad, are right. Where one side has more, as for even pictures
# and stride 2, a layer before the pool pads 0. An AveragePool that counts its padding, with more of it behind the
# picture, divides by other counts. PRelu with a factor for each row takes them for channels. Nothing is said.
# Seen, 1 x 8 x 8 x 8 negative numbers: maxima with pads 0 0 1 1, 1 0 0 1 and 1 1 0 0: 44 % are wrong, and 0; Pad 0.5:
# 0; averages with pads 0 0 1 1, count_include_pad 1: 44 % are wrong; PRelu by rows: 88 % are wrong.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet --python 3.11 environment
uv pip install --quiet --python environment/bin/python x2paddle==1.6.0 paddlepaddle==3.3.1 onnx==1.16.2 \
    onnxruntime==1.32.0 numpy==2.2.6 six==1.17.0 treelib==1.8.0 requests==2.34.2 pandas==3.1.1 sympy==1.14.0 \
    setuptools==84.2.1
OMP_NUM_THREADS=1 environment/bin/python - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import paddle
from onnx import TensorProto, helper, numpy_helper
from x2paddle.convert import onnx2paddle

random = np.random.default_rng(0)
x = -random.uniform(0.5, 1.5, (1, 8, 8, 8)).astype(np.float32)
pool = {"kernel_shape": [3, 3], "strides": [2, 2]}
slopes = random.uniform(0.1, 0.9, 8).astype(np.float32)
border, half = np.array([0, 0, 1, 2, 0, 0, 3, 0]), np.float32(0.5)
cases = {
    "MaxPool, pads 1 1 1 1": ("MaxPool", [], {"pads": [1, 1, 1, 1]} | pool),
    "MaxPool, SAME_UPPER": ("MaxPool", [], {"auto_pad": "SAME_UPPER"} | pool),
    "MaxPool, pads 0 0 1 1": ("MaxPool", [], {"pads": [0, 0, 1, 1]} | pool),
    "MaxPool, pads 1 0 0 1": ("MaxPool", [], {"pads": [1, 0, 0, 1]} | pool),
    "MaxPool, pads 1 1 0 0": ("MaxPool", [], {"pads": [1, 1, 0, 0]} | pool),
    "Pad with 0": ("Pad", [border], {}),
    "Pad with 0.5": ("Pad", [border, half], {}),
    "AveragePool, pads 0 0 1 1, without": ("AveragePool", [], {"pads": [0, 0, 1, 1]} | pool),
    "AveragePool, pads 0 0 1 1, counted": ("AveragePool", [], {"pads": [0, 0, 1, 1], "count_include_pad": 1} | pool),
    "PRelu by channels": ("PRelu", [slopes[:, None, None]], {}),
    "PRelu by rows": ("PRelu", [slopes[:, None]], {}),
}
results = {}
for number, (name, (operator, weights, options)) in enumerate(cases.items()):
    names = ["x", *(f"weights{i}" for i in range(len(weights)))]
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for value, name in zip(weights, names[1:])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, right.shape))
    onnx.save(model, "network.onnx")
    onnx2paddle("network.onnx", f"paddle{number}", enable_optim=False, disable_feedback=True)
    paddle.disable_static()
    network = paddle.jit.load(f"paddle{number}/inference_model/model")
    results[name] = right, network(paddle.to_tensor(x)).numpy()

wrong = {name: np.mean(~np.isclose(*both, atol=1e-4)) for name, both in results.items()}
for name, share in wrong.items():
    print(f"seen: {name}: {share:.0%} of the numbers are wrong")
for pads in ((0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 0, 0)):
    right, found = results["MaxPool, pads " + " ".join(map(str, pads))]
    padded = np.pad(x, ((0, 0), (0, 0), pads[::2], pads[1::2]))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    assert right.max() < 0 and found.max() == 0 and np.array_equal(found, windows.max((-1, -2)))
assert np.array_equal(results["Pad with 0.5"][1], results["Pad with 0"][0])
assert np.allclose(results["PRelu by rows"][1], results["PRelu by channels"][0])
for name, share in wrong.items():
    fine = name.endswith(("1 1 1 1", "SAME_UPPER", "with 0", "without", "channels"))
    assert share == 0 if fine else share > 0.2, name
END
grep '^seen' output
