"""From facts of a fleet to a verdict: root causes first, then what waits because of them."""
