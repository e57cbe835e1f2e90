"""Before redistributions remember their plans."""


class Remembered(...):
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups of each mesh.
    """

    answers = ...
