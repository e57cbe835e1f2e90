"""Before steps run in rounds."""


class ReduceScatter(...):
    """The reduction `op` over the group, to each rank its own target box, which lies in its source box.

    To run it: pack `pieces(coordinate)`, each padded to `chunk`; reduce_scatter_tensor; the first elements are this
    rank's.
    """

    rounds = ...


class AllToAll(...):
    """Each element to whoever wants and lacks it, once. With `op`, over the axes in `reduced` too: each rank then gets
    every term of its target box and reduces them.

    To run it: pack `sends(coordinate)`, in the order of the members; all_to_all_single with their sizes; copy (or, with
    `op`, reduce) each of `receives(coordinate)` into its box, in the order given.

    Along some axes of the group the ranks may be replicas, which hold the same. A rank exchanges pieces with those of
    its `peers` only: one for each part and term of the source. `diagonals` say which one; see `senders`.
    """

    rounds = ...
