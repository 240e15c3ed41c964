"""Where the ranks of a job would better run, and which links it needs: `railscope place`."""
