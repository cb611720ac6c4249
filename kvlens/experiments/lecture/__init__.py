"""Experiments of LECTURE: functions learned from the examples in a prompt."""
