"""What a run leaves behind: tables of traces, their summary, and the report made of both."""
