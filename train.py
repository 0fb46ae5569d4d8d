"""Train a quantized network, or evaluate one: the same as `qconv train`, from a checkout."""

import sys

from qconv.cli import train_as

if __name__ == "__main__":
    raise SystemExit(train_as("train.py", sys.argv[1:]))
