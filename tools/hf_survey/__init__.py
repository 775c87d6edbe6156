"""The survey behind `tools/hf_support.py`: which architectures of transformers run at which layout, and how exactly."""
