#!/usr/bin/env bash
# esp-ppq 1.3.12: average pools count the padding, though count_include_pad is 0, ONNX's default.
#
# Expected: the averages of torch and ONNX Runtime, over the pixels of the picture alone. The executor is what
# calibrates, finetunes and measures a network for Espressif's chips.
# Happens: it calls torch's pool with torch's default, which counts the padding, and never looks at the option. Steps
# and reported errors belong to another network, and layers behind see a dark frame. A pool whose strides are left out,
# which are 1 in ONNX, moves by its own size: fewer outputs. Nothing is said.
# Seen, for 4 x 4 ones, 3 x 3, pads 1: corner 0.44, edge 0.67, ONNX Runtime 1, 1; with count_include_pad 1 both the
# former. A 3 x 3 pool of 6 x 6 without strides: 2 x 2 outputs, ONNX Runtime 4 x 4; MaxPool as well.
# espdl_quantize_torch of a convolution and such a pool, 8 and 16 bits: 11 dB and 11 dB; with count_include_pad 36 dB
# and 82 dB.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python esp-ppq==1.3.12 torch==2.15.0 onnx==1.19.1 onnxruntime==1.32.0 \
    onnxscript==0.7.2 onnxsim==0.7.3 numpy==2.4.6 setuptools==80.9.0
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import torch
from esp_ppq.api import espdl_quantize_torch, load_onnx_graph
from esp_ppq.executor import TorchExecutor
from onnx import helper


def both(kind, size, **options):
    ends = [[helper.make_tensor_value_info(name, 1, shape)] for name, shape in (("x", [1, 1, size, size]), ("y", None))]
    node = helper.make_node(kind, ["x"], ["y"], kernel_shape=[3, 3], **options)
    graph = helper.make_graph([node], "graph", *ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(onnx.shape_inference.infer_shapes(model), "pool.onnx")
    x = np.ones((1, 1, size, size), np.float32)
    expected = onnxruntime.InferenceSession("pool.onnx").run(None, {"x": x})[0]
    return TorchExecutor(load_onnx_graph("pool.onnx"), device="cpu")(torch.from_numpy(x))[0].numpy(), expected


same = dict(pads=[1, 1, 1, 1], strides=[1, 1])
for count in (0, 1):
    found, expected = both("AveragePool", 4, count_include_pad=count, **same)
    print(f"found count_include_pad {count}:", *found[0, 0, 0].round(2), "ONNX Runtime", *expected[0, 0, 0].round(2))
    assert abs(found[0, 0, 0, :2] - [4 / 9, 6 / 9]).max() < 1e-6
    assert abs(expected - (found if count else 1)).max() < 1e-6
for kind in ("AveragePool", "MaxPool"):
    found, expected = both(kind, 6)
    print(f"found {kind} without strides:", found.shape[2:], "ONNX Runtime", expected.shape[2:])
    assert found.shape[2:] == (2, 2) and expected.shape[2:] == (4, 4)

for bits in (8, 16):
    for count in (False, True):
        torch.manual_seed(0)
        pool = torch.nn.AvgPool2d(3, 2, 1, count_include_pad=count)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), pool).eval()
        batches = [torch.randn(1, 3, 10, 10) for _ in range(8)]
        graph = espdl_quantize_torch(
            model=network,
            espdl_export_file="network.espdl",
            calib_dataloader=batches,
            calib_steps=8,
            input_shape=[1, 3, 10, 10],
            target="esp32p4",
            num_of_bits=bits,
            device="cpu",
            error_report=False,
            skip_export=True,
            verbose=0,
        )
        expected = network(batches[0]).detach()
        found = TorchExecutor(graph, device="cpu")(batches[0])[0]
        ratio = float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))
        print(f"found {bits} bits, count_include_pad {count}: {ratio:.1f} dB")
        assert ratio > 30 if count else ratio < 15
END
grep found output
