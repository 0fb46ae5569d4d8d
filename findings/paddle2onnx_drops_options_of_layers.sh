#!/usr/bin/env bash
# paddle2onnx 2.1.0: files lose the bounds of Hardtanh, a threshold's value, and orders of norms.
#
# Expected: the numbers that PaddlePaddle gives, or an error. This is in the recommended PaddlePaddle 3.0.0.
# Happens: Hardtanh is cut off at -1 and 1, whatever min and max are. thresholded_relu gives 0, not its value. The norms
# of order infinity, minus infinity and 0 are computed with a power and a root of other orders. PixelShuffle of channels
# last is that of channels first. Nothing is said.
# Seen: Hardtanh(0, 6) of -2 and 9: 0 and 6 in PaddlePaddle, -1 and 1 in the file. thresholded_relu(-2, 0.5, value=-3):
# -3, and 0. Norms of -2, -0.7, 0.4, 3, 9: 9, 0.4 and 5 in PaddlePaddle; 1, 1 and infinity in the file.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddle2onnx==2.1.0 paddlepaddle==3.0.0 onnx==1.17.0 \
    onnxruntime==1.32.0 numpy==2.4.6 setuptools==80.9.0
cat >program.py <<'END'  # PaddlePaddle reads the source of a layer
import numpy as np
import onnxruntime
import paddle
from paddle.nn import functional


class Layer(paddle.nn.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def both(function, x):
    x = np.asarray(x, np.float32)
    layer = Layer(function)
    layer.eval()
    wanted = layer(paddle.to_tensor(x)).numpy()
    form = [paddle.static.InputSpec(x.shape, "float32")]
    paddle.onnx.export(layer, "layer", input_spec=form, opset_version=17, optimize_tool="None")
    session = onnxruntime.InferenceSession("layer.onnx", providers=["CPUExecutionProvider"])
    return wanted, session.run(None, {session.get_inputs()[0].name: x})[0]


def compare(name, function, x, wanted, found):
    results = both(function, x)
    print(f"found {name}: PaddlePaddle {results[0].tolist()}, file {results[1].tolist()}")
    assert np.allclose(results[0], wanted) and np.allclose(results[1], found), results


line = [[-2.0, -0.7, 0.4, 3.0, 9.0]]
compare("Hardtanh(0, 6)", paddle.nn.Hardtanh(0.0, 6.0), line, [[0, 0, 0.4, 3, 6]], [[-1, -0.7, 0.4, 1, 1]])
compare(
    "thresholded_relu(x, 0.5, value=-3)",
    lambda x: functional.thresholded_relu(x, 0.5, value=-3.0),
    line,
    [[-3, -3, -3, 3, 9]],
    [[0, 0, 0, 3, 9]],
)
for order in (float("inf"), float("-inf"), 0):
    results = both(lambda x: paddle.norm(x, order, 1), line)  # noqa: B023
    print(f"found norm of order {order}: PaddlePaddle {results[0].tolist()}, file {results[1].tolist()}")
    assert results[0].tolist() in ([9], [np.float32(0.4)], [5]) and not np.allclose(*results)
wanted, found = both(lambda x: paddle.norm(x, 3, 1), line)
assert np.allclose(wanted, found)
layer = paddle.nn.PixelShuffle(2, "NHWC")
wanted, found = both(layer, np.zeros((1, 4, 2, 8)))
print("found shapes of PixelShuffle(2, 'NHWC'):", wanted.shape, found.shape)
assert wanted.shape == (1, 8, 4, 2) and found.shape != wanted.shape
END
environment/bin/python -W ignore program.py >output 2>errors || { cat output errors; exit 1; }
grep "^found" output
