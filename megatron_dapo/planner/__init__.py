"""The planner says no before the cluster does: memory, traffic, time and legal layouts of a run. Pure: no torch."""
