#!/usr/bin/env bash
# ONNX Runtime 1.32.0: made smaller by 7, 13, 14 or 15, an image of nearest pixels has half of its rows from one above.
#
# PyTorch exports interpolate(mode="nearest") as a Resize with coordinates "asymmetric" and nearest_mode "floor".
# Expected: output i is the pixel 7 i, as in PyTorch, and as x[::7]; the sizes are whole multiples, so nothing is
# rounded. Masks and targets are made smaller so, by 14 for the patches of a vision transformer.
# Happens: the place is i / (1 / 7), of a rounded 1 / 7, which falls short of the whole number, and "floor" takes the
# pixel before. Nothing is said. It is the same with sizes and with scales. Powers of 2, and other factors up to 16, are
# right.
# Seen, rows and columns off by a pixel: 56 to 8 4 of 8; 224 to 32 19 of 32; 224 to 16 9 of 16; 208 to 16 5; 240 to 16
# 14; by the factors 2 to 6, 8 to 12 and 16 none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FORM = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def wrong(old, new, by):
    """Rows and columns that are not each of the factor, of a picture of the number of its pixels."""
    x = np.arange(old * old, dtype=np.float32).reshape(1, 1, old, old)
    size = np.array([1, 1, new, new]) if by == "sizes" else np.array([1, 1, new / old, new / old], np.float32)
    inputs = ["x", "", "", "size"] if by == "sizes" else ["x", "", "size"]
    graph = helper.make_graph(
        [helper.make_node("Resize", inputs, ["y"], **FORM)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(size, "size")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    y = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0][0, 0]
    assert y.shape == (new, new)
    places = np.arange(new) * (old // new)
    rows, columns = np.divmod(y, old)
    off = rows[:, 0] != places
    assert (rows[:, 0] == places - off).all() and (columns[0] == rows[:, 0]).all()
    return int(off.sum())


WANTED = {(56, 8): 4, (224, 32): 19, (224, 16): 9, (208, 16): 5, (240, 16): 14}
found = {sizes: [wrong(*sizes, by) for by in ("sizes", "scales")] for sizes in WANTED}
for (old, new), counts in found.items():
    print(f"{old} to {new}: rows off by a pixel {counts[0]} of {new}, with scales {counts[1]}")
others = {factor: wrong(16 * factor, 16, "sizes") for factor in (2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 16)}
print("other factors:", *(f"{factor}: {count}" for factor, count in others.items()))
assert not any(others.values())
assert found == {sizes: [count, count] for sizes, count in WANTED.items()}
END
