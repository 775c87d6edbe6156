"""What `tp_step` measures and how: the models, the variants, the rounds, the profile and the tables."""
