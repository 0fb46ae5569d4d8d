"""What quantizers are made of: modules that a float checkpoint knows nothing of."""

from typing import Any

from torch import nn


class Part(nn.Module):
    """A module whose state may be absent as a whole from what is loaded; it then stays as it is."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        parts = (repr(child) for child in self.children() if child.extra_repr.__func__ is not Part.extra_repr)
        return f"{type(self).__name__}({', '.join(filter(None, (self.extra_repr(), *parts)))})"
