"""Tools that analyse a model, a script or an install. The modules import the core; the core does not import them."""
