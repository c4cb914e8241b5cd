"""The laboratory's commands of ``cacheclip``: demo, bench, eval, certify, profile, doctor, finetune, models list."""

from __future__ import annotations

from cacheclip_rag.plugins import Commands

from .bench import bench
from .certify import certify
from .demo import demo
from .doctor import doctor
from .evaluate import evaluate
from .models import list_models
from .profile import profile
from .tables import CertifyTable, FinetuneTable
from .training import finetune


def register(commands: Commands) -> None:
    """Called by the command line of the core, which found this function by its entry point."""
    commands.add("demo", demo)
    commands.add("bench", bench)
    commands.add("eval", evaluate)
    commands.add("certify", certify, CertifyTable)
    commands.add("profile", profile)
    commands.add("doctor", doctor)
    commands.add("models list", list_models)
    commands.add("finetune", finetune, FinetuneTable)
    commands.add("calibrate", finetune)  # the name that scripts of earlier versions have
