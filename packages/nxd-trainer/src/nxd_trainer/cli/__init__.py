"""The commands of nxd-trainer: functions that read the arguments after the command's name, and print.

The work is done in other modules, which are imported when needed.
"""
