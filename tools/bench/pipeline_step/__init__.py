"""What `pp_step` measures, and how."""
