"""`load_and_call.py FOLDER INPUT OUTPUT`: load a saved model in a fresh process, call it, and write what it returns."""

import sys

import nxd_trace
import torch

if __name__ == "__main__":
    folder, input_file, output_file = sys.argv[1:]
    with nxd_trace.parallel_model_load(folder) as model:
        torch.save(model(torch.load(input_file)), output_file)
