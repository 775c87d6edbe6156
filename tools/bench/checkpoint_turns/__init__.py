"""What `ckpt.py` times: the state of a rank, the ways to save and to load it, and what one turn of each takes."""
