#!/usr/bin/env bash
# aidge-onnx 0.10.1: QuantizeLinear rounds halves up, where the standard and its own Round take the even number.
#
# Expected: x / scale is rounded with halves to even, then the zero point is added, as ONNX Runtime does, and as Aidge
# computes an ONNX Round.
# Happens: each half goes up, -0.5 to 0 and 0.5 to 1, so codes have a larger mean. Where the step of an output is twice
# that of its inputs, as of an average or a sum of two, each other number is a half.
# Seen, as codes of -2.5 -1.5 -0.5 0.5 1.5 2.5: ONNX Runtime -2 -2 0 0 2 2, Aidge -2 -1 0 1 2 3, with zero points 0 and
# 3; Round: both -2 -2 0 0 2 2. Mean of all halves from -100 to 100: ONNX Runtime 0, Aidge 0.5.
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


def outputs(numbers, zero=None):
    """What ONNX Runtime and Aidge give, from a quantizer of step 1, or from Round without a zero point."""
    held = {} if zero is None else {"one": np.float32(1), "zero": np.int8(zero)}
    nodes = [helper.make_node("Round", ["x"], ["y"])]
    if held:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", *held], ["code"]),
            helper.make_node("DequantizeLinear", ["code", *held], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, numbers.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, numbers.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    wanted = onnxruntime.InferenceSession("network.onnx").run(None, {"x": numbers})[0]
    network = aidge_onnx.load_onnx("network.onnx")
    network.set_backend("cpu")
    tensor = aidge_core.Tensor(numbers)
    tensor.set_backend("cpu")
    network.forward_dims([numbers.shape], True)
    aidge_core.SequentialScheduler(network).forward(data=[tensor])
    return wanted[0], np.array(next(iter(network.get_output_nodes())).get_operator().get_output(0))[0]


halves = np.arange(-99.5, 100, dtype=np.float32)[None]
middle = abs(halves[0]) < 3
for zero in (None, 0, 3):
    wanted, found = outputs(halves, zero)
    name = "Round" if zero is None else f"zero point {zero}"
    print(f"RESULT {name}: ONNX Runtime", *wanted[middle], "mean", wanted.mean(), end=" ")
    print("Aidge", *found[middle], "mean", found.mean())
    assert np.array_equal(wanted, np.rint(halves[0]))
    assert np.array_equal(found, wanted if zero is None else halves[0] + 0.5)
END
sed -n 's/^RESULT //p' log
