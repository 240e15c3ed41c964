"""Where the fields of NCCL's own structures are, build by build."""
