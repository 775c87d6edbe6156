"""What the import paths of NeuronX Distributed promise beyond the documented API, over the nxd packages.

Users find these names under `neuronx_distributed`. New code uses the packages themselves.
"""
