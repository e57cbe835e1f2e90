"""Before an all-to-all brings terms that are reduced."""


class Piece(...):
    """A block that goes to or comes from a member of the group.

    Attributes:
        member: its place in `members(coordinate)`.
        box: where the block is in the local tensor (before the step for what is sent, after it for what is received).
    """

    add = ...
