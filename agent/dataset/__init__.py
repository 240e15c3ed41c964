"""A job as it was recorded: tables of Parquet files, written by the recorder and by importers, read by the analyses.

`schema` says what is in them, `writer` makes them, `reader` opens them.
"""
