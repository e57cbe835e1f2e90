"""Before redistributions remember the specs in which they end."""


class Remembered(...):
    """What redistributions over the meshes of a universe found out.

    Attributes:
        at_hand: the groups of each mesh.
        answers: to questions, each made once.
    """

    specs = ...
