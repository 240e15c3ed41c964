"""Observes NCCL from outside: functions and layouts of its builds, the programs' tables and events."""
