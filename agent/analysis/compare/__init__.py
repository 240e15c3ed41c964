"""Two recordings, or a recording and an estimate, figure by figure: `railscope compare`."""
