"""The commands of nxd-trainer, one file each: `main(arguments)` reads the command line and prints.

The work is done in other modules, which are imported when needed.
"""
