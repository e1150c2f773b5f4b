"""`ampkit.recording`: what each line of a script computes in, why, and what it costs."""
