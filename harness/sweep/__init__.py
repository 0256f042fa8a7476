"""A sweep: many runs from one command, on whatever Hydra's launchers reach, in one folder."""
