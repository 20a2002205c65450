"""The doctor: examines how a drafter behaves by depth and under other conditions, and looks for known faults."""
