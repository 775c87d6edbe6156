"""Pure functions that make schedules, a method to a file; messages are added by `insert_communication`."""
