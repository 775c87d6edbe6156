"""The mutations of `tools/mutate.py`: where sources can be changed, and how the tests that notice are found."""
