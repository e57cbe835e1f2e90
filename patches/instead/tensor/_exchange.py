"""Upstream the fake process group takes an empty input."""


def never_nothing(pack):
    return pack
