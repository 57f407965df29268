"""What a training run is made of, apart from its loop in :mod:`memspan.train`."""
