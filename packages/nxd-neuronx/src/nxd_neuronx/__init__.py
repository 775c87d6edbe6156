"""Names of NeuronX Distributed beyond the documented API, implemented by the nxd packages.

Users find these names under `neuronx_distributed`. New code uses the packages themselves.
"""
