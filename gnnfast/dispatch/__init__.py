"""From a request to a kernel: :mod:`.select` decides (pure), :mod:`.execute` is the one driver of every op, :mod:`.sampling` and
:mod:`.autotune` are what settings may ask it for."""
