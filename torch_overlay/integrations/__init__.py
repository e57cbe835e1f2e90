"""Doors of other programs, each in a folder of its own; nothing here is imported unless such a program asks for it."""
