"""Before compiled code makes views."""

OWN_STATE = ("_view", "_shared_state")
