#!/usr/bin/env bash
# aidge-onnx 0.10.1: auto_pad SAME of ONNX pads by kernel less stride, so strided layers lose rows and columns.
#
# Expected: with stride 2, an image of 5 x 5 becomes one of 3 x 3, as the standard and ONNX Runtime have it; or the file
# is refused. The padding depends on the size: 3 x 3 windows need 2 pixels for odd images and 1 for even ones.
# Happens: it is always 1. Odd images become too small, and their windows stand elsewhere, in Conv, MaxPool and
# AveragePool. Nothing is said. With stride 3, where size 5 needs 1 pixel and size 4 needs 2, it is 0.
# Seen, as heights (ONNX Runtime, Aidge) for windows of 3 x 3: stride 1, size 5: 5 5; stride 2, size 6: 3 3; stride 2,
# size 5: 3 2; stride 3, size 5: 2 1; stride 3, size 4: 2 1. Sums of ones, first row, stride 2, size 5: 4 6 4 and 9 9.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python aidge-core==0.10.1 aidge-backend-cpu==0.10.1 \
  aidge-onnx==0.10.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import aidge_backend_cpu  # noqa: F401
import aidge_core
import aidge_onnx
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def outputs(operator, stride, size):
    """What ONNX Runtime and Aidge give for an image of ones."""
    image = np.ones((1, 1, size, size), np.float32)
    held = {"weight": np.ones((1, 1, 3, 3), np.float32)} if operator == "Conv" else {}
    window = {"kernel_shape": [3, 3], "strides": [stride, stride], "auto_pad": "SAME_UPPER"}
    shape = [1, 1, -(-size // stride), -(-size // stride)]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", *held], ["y"], **window)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    wanted = onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0]
    assert list(wanted.shape) == shape
    network = aidge_onnx.load_onnx("network.onnx")
    network.set_backend("cpu")
    tensor = aidge_core.Tensor(image)
    tensor.set_backend("cpu")
    network.forward_dims([image.shape], True)
    aidge_core.SequentialScheduler(network).forward(data=[tensor])
    return wanted[0, 0], np.array(next(iter(network.get_output_nodes())).get_operator().get_output(0))[0, 0]


for operator in ("Conv", "MaxPool", "AveragePool"):
    for stride, size, height in ((1, 5, 5), (2, 6, 3), (2, 5, 2), (3, 5, 1), (3, 4, 1)):
        wanted, found = outputs(operator, stride, size)
        print(f"RESULT {operator}, stride {stride}, size {size}: heights {len(wanted)} {len(found)}", end="")
        print("; first rows", *wanted[0], "and", *found[0])
        assert len(found) == height
        assert (len(found) == len(wanted)) == (size % stride == 0)
END
sed -n 's/^RESULT //p' log
