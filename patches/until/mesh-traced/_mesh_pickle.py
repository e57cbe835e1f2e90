"""Before compiled code makes views."""

# Process groups can't be pickled, and the rest follows from the other attributes.
NOT_PICKLED = ("_view", "_shared_state", "_pg_registry")
