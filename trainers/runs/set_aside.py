"""What a run that starts anew, or from an older checkpoint, leaves behind: kept until it goes on.

`<run>/.set_aside` is itself laid out as a run: the checkpoints of later steps, the export, and
copies of the small files as they were. It is removed when the run has written a new checkpoint or
its export. Until then nothing is lost: `resume=<run>/.set_aside/checkpoints/step-N.ckpt` goes back.
"""

import shutil
from pathlib import Path

from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import atomic_write, delete
from trainers.runs.checkpoint_files import checkpoint_files, delete_partial, number_of

SET_ASIDE = ".set_aside"
COPIED = ("config.yaml", "provenance.json", "metrics.csv")


@rank_zero_only
def set_aside(folder: Path, step: int, source: Path | None = None) -> None:
    """Move out of sight what a run that goes on from `step` makes again.

    Every step of it is one rename, in an order that a kill may cut anywhere: first the export, so
    that the run does not look finished; then the checkpoints, the oldest first, so that the newest
    is found until all of them are aside. The caller writes the new config.yaml after that.

    Args:
        folder: the run's.
        step: checkpoints of later steps are moved.
        source: the checkpoint that the run goes on from, which stays whatever its name is.
    """
    for left in folder.glob(".export.*"):  # by killed writes
        delete(left)
    delete_partial(folder / "checkpoints")
    aside = folder / SET_ASIDE
    checkpoints = [
        path
        for path in checkpoint_files(folder / "checkpoints")
        if number_of(path) > step and not (source and source.exists() and path.samefile(source))
    ]
    export = folder / "export"
    moved = [export, *checkpoints] if export.exists() else checkpoints
    if not moved:
        return
    (aside / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (folder / name).is_file() and not (aside / name).exists():
            with atomic_write(aside / name) as temporary:
                shutil.copy(folder / name, temporary)
    for path in moved:
        place = aside / path.relative_to(folder)
        delete(place)  # of an earlier run, which this one has gone past
        path.rename(place)
    names = ", ".join(path.stem for path in moved)
    print(f"{names} set aside in {aside}, until this run has written a new checkpoint")


@rank_zero_only
def drop_set_aside(folder: Path) -> None:
    """Remove what a run has set aside: it has gone on."""
    shutil.rmtree(folder / SET_ASIDE, ignore_errors=True)
