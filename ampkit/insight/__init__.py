"""Tools that analyse a model, a script or an install. Its modules import the core; the core does not import them."""
