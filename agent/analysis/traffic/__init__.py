"""Who sends how much to whom, and over which rails and ports."""
