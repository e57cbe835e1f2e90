"""Before steps run in rounds."""


class ReduceScatter(...):
    """The reduction `op` over the group, to each rank its own target box, which lies in its source box.

    To run it: pack `pieces(coordinate)`, each padded to `chunk`; reduce_scatter_tensor; the first elements are this
    rank's.
    """

    rounds = ...


class AllToAll(...):
    """Each element to whoever wants and lacks it, once. With `op`, it also ends the reduction over `reduced`, which are
    some of its axes: each rank gets every term of its target box and reduces them one after the other. So `op` can't be
    "avg": that is a `Divide` and then "sum".

    To run it: pack `sends(coordinate)`, each at the place of its member; all_to_all_single with one size for each
    member; copy (or, with `op`, reduce) each of `receives(coordinate)` into its box, in the order in which `receives`
    gives them.

    Several ranks of the group may hold the same part and term of the source. A rank exchanges pieces with one of them
    for each part and term: these are its `peers`. Without `diagonals` that is the nearest; see `senders`.
    """

    rounds = ...
