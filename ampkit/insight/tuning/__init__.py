"""`ampkit.tune`: a model trained at every level, side by side, and which level to take."""
