"""A session's models: weights in lower precision with float32 values, and the shell around a forward."""
