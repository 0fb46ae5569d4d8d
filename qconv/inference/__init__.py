"""Integer inference: operators, and the models that run on them."""

from .build import FrozenModel as FrozenModel
from .freeze import freeze as freeze
from .layer_check import LayerCheck as LayerCheck
from .parts import ReadBeside as ReadBeside
from .program_file import save_program as save_program
from .rewrite import Frozen as Frozen
from .verify import Verification as Verification, verify as verify
