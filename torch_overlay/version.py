"""The version of this package and the day of its release: everything else that names one reads it here."""

__version__ = "0.1.0"
RELEASED = "2026-11-29"
