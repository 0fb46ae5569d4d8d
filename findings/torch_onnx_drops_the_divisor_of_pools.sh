#!/usr/bin/env bash
# torch 2.15.0: both ONNX exporters drop divisor_override of AvgPool2d and AvgPool3d.
#
# With divisor_override=1 an average pool is a sum, as integer networks use it to divide once, at the end.
# Expected: the sums are divided by it in the file, too, by a factor behind AveragePool; or the export is refused.
# Happens: the file has AveragePool alone, which divides by the size of the window. Nothing is said. The program of
# torch.export is right.
# Seen, for a window of 4 ones and divisors 1, 8: torch 4.0, 0.5; the program 4.0, 0.5; both files 1.0, 1.0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 onnx==1.23.2 onnxruntime==1.32.0 \
  onnxscript==0.7.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import onnxruntime
import torch


def of_file():
    return onnxruntime.InferenceSession("pool.onnx").run(None, {"x": image.numpy()})[0].item()


for pool, image in ((torch.nn.AvgPool2d, torch.ones(1, 1, 2, 2)), (torch.nn.AvgPool3d, torch.ones(1, 1, 1, 2, 2))):
    for divisor in (1, 8):
        kernel = image.shape[2:]
        layer = pool(kernel, divisor_override=divisor).eval()
        wanted, program = layer(image).item(), torch.export.export(layer, (image,)).module()(image).item()
        torch.onnx.export(layer, (image,), "pool.onnx", input_names=["x"], dynamo=True, verbose=False)
        files = [of_file()]
        torch.onnx.export(layer, (image,), "pool.onnx", input_names=["x"], dynamo=False)
        files.append(of_file())
        print(f"{pool.__name__}, divisor {divisor}: torch {wanted}, program {program}, files", *files)
        assert wanted == program == 4 / divisor
        assert files == [1, 1]
END
