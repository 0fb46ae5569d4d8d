"""Programs: frozen networks as short lists of exact operations, and the plans in C that run them."""

from . import operations as operations
from .operations import Program as Program
