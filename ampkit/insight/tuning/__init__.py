"""`ampkit.tune`: train a model at every level, side by side, and recommend a way."""
