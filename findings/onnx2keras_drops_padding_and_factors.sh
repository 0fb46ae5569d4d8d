#!/usr/bin/env bash
# onnx2keras 0.0.25: a MaxPool pads with zeros, an AveragePool counts them, and auto_pad, alpha and beta are dropped.
#
# Expected: the numbers of the ONNX file, or an error, as for output_padding of a ConvTranspose. PyTorch's ResNets have
# a MaxPool with pads, and its addmm a Gemm with alpha and beta.
# Happens: pads of pools become a layer of zeros in front. Maxima of negative numbers are 0 at the border, and averages
# are too small there, though count_include_pad is 0, ONNX's default. Conv and pools with auto_pad have no padding,
# MaxPool no dilations. Gemm is computed without alpha and beta, and the LRN of size channels with that many times the
# alpha, and with more channels. Nothing is said.
# Seen: of -1: maxima 0, averages by 3 x 3 -0.44 in the corner. Conv of 3 x 3 with SAME_UPPER of 8 x 8: 6 x 6.
# Gemm with alpha=0.5 and beta=3 of 8 ones and a bias of 1: 9, not 7. LRN of ones, alpha=3, size=3: 0.077, not 0.33.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx2keras==0.0.25 tensorflow==2.21.0 keras==3.15.1 \
    onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 setuptools==80.9.0
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import logging
import os

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
logging.disable(logging.CRITICAL)
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx2keras import onnx_to_keras


def both(kind, inputs, held=None, **attributes):
    inputs, held = np.asarray(inputs, np.float32), held or {}
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *held], ["y"], **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * inputs.ndim)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"x": inputs})[0]
    image = inputs.ndim == 4
    network = onnx_to_keras(model, ["x"], verbose=False, name_policy="renumerate", change_ordering=image)
    found = np.asarray(network(np.moveaxis(inputs, 1, -1) if image else inputs))
    return wanted, np.moveaxis(found, -1, 1) if image else found


def show(name, wanted, found):
    first = f"file {np.ravel(wanted)[0]:.3g}, Keras {np.ravel(found)[0]:.3g}"
    print(f"found {name}: {first}, shapes {wanted.shape} and {found.shape}")


x = np.full((1, 2, 8, 8), -1.0)
pool = {"kernel_shape": [3, 3], "strides": [2, 2]}
for kind, corner in (("MaxPool", 0), ("AveragePool", -4 / 9)):
    wanted, found = both(kind, x, pads=[1, 1, 1, 1], **pool)
    show(f"{kind} with pads", wanted, found)
    assert (wanted == -1).all() and np.isclose(found[0, 0, 0, 0], corner)
    wanted, found = both(kind, x, auto_pad="SAME_UPPER", **pool)
    show(f"{kind} with SAME_UPPER", wanted, found)
    assert wanted.shape == (1, 2, 4, 4) and found.shape == (1, 2, 3, 3)
wanted, found = both("MaxPool", x, kernel_shape=[3, 3], strides=[1, 1], dilations=[2, 2])
show("MaxPool with dilations", wanted, found)
assert wanted.shape == (1, 2, 4, 4) and found.shape == (1, 2, 6, 6)
weight = np.ones((2, 2, 3, 3), np.float32)
wanted, found = both("Conv", x, {"w": weight}, auto_pad="SAME_UPPER")
show("Conv with SAME_UPPER", wanted, found)
assert wanted.shape == (1, 2, 8, 8) and found.shape == (1, 2, 6, 6)
wanted, found = both("Conv", x, {"w": weight}, pads=[1, 1, 1, 1])
assert np.allclose(wanted, found)
held = {"w": np.ones((8, 5), np.float32), "b": np.ones(5, np.float32)}
wanted, found = both("Gemm", np.ones((3, 8)), held, alpha=0.5, beta=3.0)
show("Gemm with alpha=0.5, beta=3", wanted, found)
assert (wanted == 7).all() and (found == 9).all()
wanted, found = both("LRN", np.ones((1, 9, 2, 2)), size=3, alpha=3.0, beta=1.0, bias=1.0)
show("LRN of three channels", wanted, found)
assert np.allclose(wanted[0, 1], 1 / 4) and found.max() < 1 / 12
END
grep "^found" output
