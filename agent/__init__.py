"""What the facts of `probes` mean: counts, identity, rails, stalls, and what a job did."""
