"""From the question that a redistribution asks to the program that runs."""

from __future__ import annotations
