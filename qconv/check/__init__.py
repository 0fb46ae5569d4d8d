"""What goes wrong in the training of quantized layers, told once; only those who attach it import this room."""

from .first_batches import forget as forget, watch as watch
from .overview import Problem as Problem, check as check
