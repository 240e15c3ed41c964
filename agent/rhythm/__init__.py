"""Where the calls of a job repeat: its iterations, in what was recorded and in what is seen live."""
