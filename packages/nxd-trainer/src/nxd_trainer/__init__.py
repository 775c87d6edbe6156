"""Train and serve large models with tensor and data parallelism on CPU, CUDA and XLA."""

__version__ = "0.1.0"
