"""The pure half of a transfer: who sends what to whom, and in which exchange. Standard library only."""
