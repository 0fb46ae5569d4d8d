"""``python -m qconv``."""

from .cli import main

raise SystemExit(main())
