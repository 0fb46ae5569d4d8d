#!/usr/bin/env bash
# torchmetrics 1.9.0: squared and absolute errors, R2 and more of uint8 pictures or codes wrap around at 256.
#
# Expected: the numbers of the same pictures as floats, as PeakSignalNoiseRatio, KendallRankCorrCoef and MeanMetric give
# them, or an error, as PearsonCorrCoef and StructuralSimilarityIndexMeasure raise it.
# Happens: the difference is taken in uint8: 3 - 5 is 254. The mean absolute error of two pictures close to each other
# becomes half of the range, squares keep their last 8 bits, so that the error looks smaller. int16 wraps in squares of
# R2, which passes 1. Nothing is said.
# Seen, of float32 and uint8, for codes off by up to 30: MeanAbsoluteError 14.4 and 128.7, MeanSquaredError 282.4 and
# 88.7, WeightedMeanAbsolutePercentageError 0.11 and 1.01, SymmetricMeanAbsolutePercentageError 0.25 and 414879,
# ExplainedVariance 0.95 and 0.08, R2Score 0.95 and 1.01 (of int16 1.02), TotalVariation of a picture 1.4e6 and 2.1e6,
# PSNR with blocked effect 27.1 and 29.4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchmetrics==1.9.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchmetrics import aggregation, image, regression

torch.manual_seed(0)
true = torch.randint(0, 256, (20000,))
guess = (true + torch.randint(-30, 30, true.shape)).clamp(0, 255)
pictures = torch.randint(0, 256, (2, 1, 64, 64))
blurred = (pictures + torch.randint(-20, 20, pictures.shape)).clamp(0, 255)


def error(metric, first, second, kind):
    return float(metric(first.to(kind), second.to(kind)))


wanted = {
    "MeanAbsoluteError": lambda right, wrong: right < 15 and wrong > 120,
    "MeanSquaredError": lambda right, wrong: right > 280 and wrong < 90,
    "WeightedMeanAbsolutePercentageError": lambda right, wrong: right < 0.12 and wrong > 0.9,
    "SymmetricMeanAbsolutePercentageError": lambda right, wrong: right < 0.3 and wrong > 1e5,
    "ExplainedVariance": lambda right, wrong: right > 0.9 and wrong < 0.1,
    "R2Score": lambda right, wrong: right < 0.95 and wrong > 1,
    "MinkowskiDistance": lambda right, wrong: right > 1.5 * wrong,
    "KendallRankCorrCoef": lambda right, wrong: abs(right - wrong) < 1e-6,
}
for name, rule in wanted.items():
    metric = getattr(regression, name)(**({"p": 2} if name == "MinkowskiDistance" else {}))
    few = slice(300 if name.startswith("Kendall") else None)
    floats, bytes_ = (error(metric, guess[few], true[few], kind) for kind in (torch.float32, torch.uint8))
    print(f"found {name}: float32 {floats:.4f}, uint8 {bytes_:.4f}")
    assert rule(floats, bytes_) and error(metric, guess[few], true[few], torch.int32) == floats
shorts = error(regression.R2Score(), guess, true, torch.int16)
print(f"found R2Score, int16: {shorts:.4f}")
assert shorts > 1
blocked = image.PeakSignalNoiseRatioWithBlockedEffect(data_range=255.0)
floats, bytes_ = (error(blocked, blurred, pictures, kind) for kind in (torch.float32, torch.uint8))
print(f"found PSNR with blocked effect: float32 {floats:.2f}, uint8 {bytes_:.2f}")
assert bytes_ > floats + 1.5
floats, bytes_ = (float(image.TotalVariation()(pictures.to(kind))) for kind in (torch.float32, torch.uint8))
print(f"found TotalVariation: float32 {floats:.0f}, uint8 {bytes_:.0f}")
assert bytes_ > 1.3 * floats
ratio = image.PeakSignalNoiseRatio(data_range=255.0)
assert error(ratio, blurred, pictures, torch.uint8) == error(ratio, blurred, pictures, torch.float32)
assert float(aggregation.MeanMetric()(true.to(torch.uint8))) == float(aggregation.MeanMetric()(true.float()))
for metric, first, second in (
    (regression.PearsonCorrCoef(), guess, true),
    (image.StructuralSimilarityIndexMeasure(data_range=255.0), blurred, pictures),
):
    try:
        error(metric, first, second, torch.uint8)
    except RuntimeError:
        continue
    raise AssertionError(f"{metric} raised nothing")
END
