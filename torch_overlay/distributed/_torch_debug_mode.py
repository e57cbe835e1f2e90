"""The mode in which torch lists what it runs."""

from torch.utils._debug_mode import get_active_debug_mode as get_active_debug_mode
