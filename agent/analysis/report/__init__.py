"""Everything a recording tells of a job, as text, JSON or a page: `railscope report`."""
