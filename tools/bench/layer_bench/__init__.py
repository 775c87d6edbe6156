"""What `layers` and `activation_memory` measure and how: the layers, their rivals, the ranks, the bytes, the tables."""
