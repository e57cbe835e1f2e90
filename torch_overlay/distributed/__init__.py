"""Bodies and helpers that mirror ``torch/distributed/``: the folder that goes upstream."""

from ..versions import older_folders  # this file stays behind

__path__[:0] = older_folders()
