"""What this host knows of the fabric beyond its ports: the switch at each cable's end, and the queue pairs over it."""
