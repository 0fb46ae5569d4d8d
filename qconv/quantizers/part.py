"""What quantizers are made of: modules that a float checkpoint knows nothing of."""

from typing import Any

from torch import nn


class Part(nn.Module):
    """A module whose state may be absent as a whole from what is loaded; it then stays as it is."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
