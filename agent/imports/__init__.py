"""Data that others recorded, put into the tables of railscope's datasets.

One module a format: `nccl_log`, `kineto`, `chakra` (and `execution_trace`), `torch_flight_recorder`, `nccl_inspector`,
`nccl_profiler`, `nccl_ras`, `deepspeed`, `railscope_recording`.  `runner` tells which format a file has, `sources`
reads files, archives and compressed files as streams, `target` writes the tables, and `command` is `railscope import`.

What such files tell of a job that hangs, `flight_hang`, `nccl_ras` and `recording_hang` read; `hang_command` is
`railscope diagnose FILE…`.

What an importer cannot make sense of it counts and reports with its place (`Problems`); it never stops for that, and
it never makes up what the data does not say.
"""
