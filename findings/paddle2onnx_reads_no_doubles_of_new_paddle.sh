#!/usr/bin/env bash
# paddle2onnx 2.1.0, paddlepaddle 3.3.1: the slope of LeakyReLU and the value of Pad2D are stray numbers in the file.
#
# Expected: the numbers of the layers, as with PaddlePaddle 3.0.0, or an error. Both are the newest versions; pip
# installs them together, as paddle2onnx states no version of PaddlePaddle that it needs, but for its README.
# Happens: PaddlePaddle now stores some numbers of layers in double precision. Of these the file holds what is in memory
# by chance: near 0, or huge. For GroupNorm, epsilon is 0. ELU and BatchNorm are right. Nothing is said, and the file is
# valid.
# Seen: LeakyReLU(0.2) of -1: -0.2 in PaddlePaddle; 4.5e-12, 7.8e28 and others in files. Border of Pad2D(1, value=0.5):
# 0. GroupNorm with epsilon=0.1 of -1 and 2: -0.98 and 0.98 in PaddlePaddle, -1 and 1 in the file.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
for version in 3.0.0 3.3.1; do
    uv venv --quiet --clear environment
    uv pip install --quiet --python environment/bin/python paddle2onnx==2.1.0 paddlepaddle==$version onnx==1.17.0 \
        onnxruntime==1.32.0 numpy==2.4.6 setuptools==80.9.0
    environment/bin/python -W ignore - $version >output 2>errors <<'END' || { cat output errors; exit 1; }
import sys

import numpy as np
import onnx
import onnxruntime
import paddle
from paddle import nn

version = sys.argv[1]
assert paddle.__version__ == version
x = np.array([-1.0, 2.0, 2.0, 2.0], np.float32).reshape(1, 4, 1, 1)
layers = {
    "LeakyReLU(0.2)": (nn.LeakyReLU(0.2), x, False),
    "Pad2D(1, value=0.5)": (nn.Pad2D(1, value=0.5), x, False),
    "GroupNorm(2, 4, epsilon=0.1)": (nn.GroupNorm(2, 4, epsilon=0.1), x, False),
    "ELU(0.5)": (nn.ELU(0.5), x, True),
    "BatchNorm2D(4, epsilon=0.1)": (nn.BatchNorm2D(4, epsilon=0.1), x, True),
}
for name, (layer, inputs, right) in layers.items():
    layer.eval()
    wanted = layer(paddle.to_tensor(inputs)).numpy().ravel()[:2]
    form = [paddle.static.InputSpec(inputs.shape, "float32")]
    paddle.onnx.export(layer, "layer", input_spec=form, opset_version=17, optimize_tool="None")
    onnx.checker.check_model("layer.onnx", full_check=True)
    session = onnxruntime.InferenceSession("layer.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: inputs})[0].ravel()[:2]
    print(f"found with {version}, {name}: PaddlePaddle {wanted.tolist()}, file {found.tolist()}")
    assert np.allclose(wanted, found, atol=1e-5) == (right or version == "3.0.0")
END
    grep "^found" output
done
