"""What Hydra has to be told of our sweeper and launchers, and what their extras are called."""

from __future__ import annotations

import re
from importlib.util import find_spec

from hydra.core.plugins import Plugins

from harness.sweep.ray_launcher import RayLauncher
from harness.sweep.sweeper import Sweeper

NAMESPACE = "hydra_plugins.harness"
"""Hydra takes plugins by names below ``hydra_plugins`` only. It finds there what is in a package
of that name, or, like ours, what was registered under such a name."""

EXTRAS = {"joblib": "joblib", "slurm": "slurm", "submitit": "slurm"}
"""By how the name of a launcher begins, the extra that brings it. ``ray`` says so itself."""


def register() -> None:
    """Make ``hydra/sweeper=harness`` and ``hydra/launcher=ray``, ``slurm`` known to Hydra."""
    known = Plugins.instance().class_name_to_class
    known[f"{NAMESPACE}.Sweeper"] = Sweeper
    known[f"{NAMESPACE}.RayLauncher"] = RayLauncher
    if find_spec("hydra_plugins") and find_spec("hydra_plugins.hydra_submitit_launcher"):
        from harness.sweep import slurm_launcher  # noqa: PLC0415 (an extra)

        known[f"{NAMESPACE}.SlurmLauncher"] = slurm_launcher.SlurmLauncher
        slurm_launcher.register()


def missing_extra(message: str) -> str | None:
    """What to do about a message of Hydra's that says that it cannot find a launcher."""
    found = re.search(rf"hydra/launcher/({'|'.join(EXTRAS)})", message)
    if found is None:
        return None
    extra = EXTRAS[found[1]]
    return f"hydra/launcher: {extra} is not installed; pip install 'grammar-draft-harness[{extra}]'"
