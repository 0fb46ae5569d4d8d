"""Inference on integers: operators, and the models that run on them."""

from .freeze import Frozen as Frozen
from .freeze import FrozenModel as FrozenModel
from .freeze import freeze as freeze
from .layer_check import LayerCheck as LayerCheck
from .parts import ReadBeside as ReadBeside
from .verify import Verification as Verification
from .verify import verify as verify
