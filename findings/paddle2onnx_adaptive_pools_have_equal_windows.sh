#!/usr/bin/env bash
# paddle2onnx 2.1.0: adaptive pools have windows of one size in the file, and take pixels from wrong places.
#
# Expected: as in PaddlePaddle, windows that cover all pixels, or an error where ONNX has no such pool. PyTorch's
# exporter refuses sizes that do not divide the input's.
# Happens: the file has an AveragePool or MaxPool with a stride of the input's size by the output's, rounded down, and a
# kernel that reaches the end. That is right where the output's size divides the input's, and at times otherwise.
# Nothing is said. This is in the recommended PaddlePaddle 3.0.0.
# Seen: 8 pixels, numbered from 0, to 3, averages: 1, 3.5, 6 in PaddlePaddle; 1.5, 3.5, 5.5 in the file. 14 to 4: 1.5,
# 4.5, 8.5, 11.5, and 2, 5, 8, 11. 10 to 7, maxima: 1, 2, 4, 5, 7, 8, 9, and 3 to 9.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddle2onnx==2.1.0 paddlepaddle==3.0.0 onnx==1.17.0 \
    onnxruntime==1.32.0 numpy==2.4.6 setuptools==80.9.0
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import onnxruntime
import paddle


def both(layer, count):
    x = np.arange(count, dtype=np.float32).reshape(1, 1, 1, count)
    layer.eval()
    wanted = layer(paddle.to_tensor(x)).numpy().ravel()
    form = [paddle.static.InputSpec(x.shape, "float32")]
    paddle.onnx.export(layer, "layer", input_spec=form, opset_version=17, optimize_tool="None")
    session = onnxruntime.InferenceSession("layer.onnx", providers=["CPUExecutionProvider"])
    return wanted, session.run(None, {session.get_inputs()[0].name: x})[0].ravel()


for kind in (paddle.nn.AdaptiveAvgPool2D, paddle.nn.AdaptiveMaxPool2D):
    for count, size in ((12, 4), (8, 3), (11, 4), (14, 4), (10, 7)):
        wanted, found = both(kind((1, size)), count)
        name = f"{kind.__name__}, {count} to {size}"
        print(f"found {name}: PaddlePaddle {wanted.tolist()}, file {found.tolist()}")
        assert np.array_equal(wanted, found) == (count % size == 0)
        windows = [(place * count // size, -(-(place + 1) * count // size)) for place in range(size)]
        reduce = np.mean if kind is paddle.nn.AdaptiveAvgPool2D else np.max
        assert np.allclose(wanted, [reduce(np.arange(*window)) for window in windows])
END
grep "^found" output
