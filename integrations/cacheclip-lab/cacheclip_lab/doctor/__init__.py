"""``cacheclip doctor``: what recorded requests would gain from each kind of cache. No model is needed."""
