"""What a session does to a model: cast its weights, keep norms float32, cast the inputs and outputs of its forward."""
