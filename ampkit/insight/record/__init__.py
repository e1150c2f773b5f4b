"""`ampkit.recording`: the dtype in which each line of a script computes, the reason, and the cost."""
