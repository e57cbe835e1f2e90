"""What later releases have in ``torch.utils._debug_mode``, and bodies ask for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._debug_mode import DebugMode

_torchs = DebugMode.record_redistribute_calls


class _DebugMode:
    """Never instantiated: its method is set on torch's DebugMode."""

    def record_redistribute_calls(
        self: DebugMode, *given: Any, is_explicit: bool = False, **named: Any
    ) -> AbstractContextManager[None]:
        """Before 2.11 a redistribution is listed alike, whoever asked for it."""
        return _torchs(self, *given, **named)
