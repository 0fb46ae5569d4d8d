#!/usr/bin/env bash
# absl-py 2.3.1, hydra-core 1.3.2.
# absl.logging, which OpenVINO's, MLflow's and other packages import, installs a handler on the error stream of that moment.
# Expected: a program that puts another stream in its place later keeps both open.
# What happens: when Hydra configures logging, Python ends all handlers, and absl's closes the stream that it began with,
# unless it is the present sys.stderr or sys.stdout. Every later write there fails.
# Seen:
#   plain handler: closed False
#   absl's handler: closed True, ValueError: I/O operation on closed file
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/environment"
uv pip install --quiet --python "$folder/environment/bin/python" absl-py==2.3.1 hydra-core==1.3.2
cat > "$folder/job.py" <<'PYTHON'
import io
import logging
import sys

from hydra.core.utils import configure_log
from omegaconf import OmegaConf

kept, first = sys.stderr, io.StringIO()
sys.stderr = first
if "absl" in sys.argv:
    import absl.logging
else:
    handler = logging.StreamHandler()
sys.stderr = kept
configure_log(OmegaConf.create({"version": 1, "root": {"level": "INFO"}}))
said = f"closed {first.closed}"
try:
    first.write("more")
except ValueError as error:
    said += f", ValueError: {error}"
print(said)
PYTHON
plain=$("$folder/environment/bin/python" "$folder/job.py")
with_absl=$("$folder/environment/bin/python" "$folder/job.py" absl)
echo "plain handler: $plain"
echo "absl's handler: $with_absl"
[ "$plain" = "closed False" ]
[ "$with_absl" = "closed True, ValueError: I/O operation on closed file" ]
