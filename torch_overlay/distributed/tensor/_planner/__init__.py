"""The planner of redistributions: pure functions over plain values, standard library only."""
