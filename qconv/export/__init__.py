"""Files for other runtimes: each target is a view of a frozen model's program."""

from .comparison import verify_export as verify_export
from .targets import export as export
