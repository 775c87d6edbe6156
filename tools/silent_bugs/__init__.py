"""Published silent numerical bugs of distributed training, each a switchable fault in a plain PyTorch program."""
