"""When rails and jobs are busy, and whether jobs that share a link meet: `railscope bursts`."""
