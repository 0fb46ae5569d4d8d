#!/usr/bin/env bash
# ONNX Runtime 1.32.0: Sigmoid on a CPU is off by up to its whole value below -15, and 0 from -18 on.
#
# Expected: a few units in the last place, as for Exp: sigmoid(-20) is 2e-9, a float like any other, and x * Sigmoid(x)
# keeps the sign of x. ONNX's reference evaluator gives that.
# Happens: small values are multiples of 2^-25, as of a sum that ends in + 0.5. At -17 it is twice too large, at -18 it
# is 0. So SiLU is -0.0 there, and a sign behind it, as in a binary network, flips; the same as 1 / (1 + Exp(-x)) is
# right.
# Seen at -10, -15, -17, -18, -20: 0.0002, 0.17, 1.2, 1.0 and 1.0 of the right value too much or too little.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

nodes = [
    helper.make_node("Sigmoid", ["x"], ["sigmoid"]),
    helper.make_node("Neg", ["x"], ["minus"]),
    helper.make_node("Exp", ["minus"], ["power"]),
    helper.make_node("Add", ["power", "one"], ["sum"]),
    helper.make_node("Reciprocal", ["sum"], ["by_exp"]),
    helper.make_node("Mul", ["x", "sigmoid"], ["silu"]),
    helper.make_node("Less", ["silu", "zero"], ["is_negative"]),
]
floats = ("x", "sigmoid", "by_exp")
infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in floats}
graph = helper.make_graph(
    nodes,
    "graph",
    [infos["x"]],
    [infos["sigmoid"], infos["by_exp"], helper.make_tensor_value_info("is_negative", TensorProto.BOOL, ["n"])],
    [numpy_helper.from_array(np.float32(value), name) for name, value in (("one", 1), ("zero", 0))],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
x = np.array([-10, -15, -17, -18, -20], np.float32)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
wanted = 1 / (1 + np.exp(-x.astype(np.float64)))
for name, run in (("reference", ReferenceEvaluator(model).run), ("ONNX Runtime", session.run)):
    sigmoid, by_exp, is_negative = run(None, {"x": x})
    errors = [np.abs(each / wanted - 1) for each in (sigmoid, by_exp)]
    print(f"{name}: Sigmoid off by {errors[0].round(5)}, by Exp {errors[1].max():.0e}, SiLU negative {is_negative}")
    assert errors[1].max() < 1e-6
    if name == "reference":
        assert errors[0].max() < 1e-6 and is_negative.all()
assert 1e-5 < errors[0][0] < 1e-3 and errors[0][1] > 0.1 and errors[0][2] > 1
assert (sigmoid[3:] == 0).all() and is_negative.tolist() == [True, True, True, False, False]
assert np.array_equal(sigmoid, np.round(sigmoid * 2**25) / 2**25)
END
