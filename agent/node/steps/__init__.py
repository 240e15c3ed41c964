"""How long the steps of jobs take, and how many there were, from the running stream of their calls."""
