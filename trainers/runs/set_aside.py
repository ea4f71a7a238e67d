"""`<run>/.set_aside`: files replaced by a run that starts anew or from an older checkpoint.

It is laid out as a run: later checkpoints, the export, and copies of the small files. It is removed
when the run has written a new checkpoint or its export. Until then nothing is lost:
`resume=<run>/.set_aside/checkpoints/step-N.ckpt` goes back.
"""

import shutil
from pathlib import Path

from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import atomic_write, delete, refuse_links
from trainers.runs.checkpoint_files import checkpoint_files, delete_partial, number_of

SET_ASIDE = ".set_aside"
MEASURED = ".measured"  # the checkpoint of the steps that `minutes=` times
COPIED = ("config.yaml", "provenance.json", "metrics.csv")


@rank_zero_only
def set_aside(folder: Path, step: int, source: Path | None = None) -> None:
    """Move the export and checkpoints after `step`, to be made again, to `.set_aside`.

    Each move is one rename, in an order that a kill may cut anywhere: first the export, so that the
    run does not look finished; then checkpoints, oldest first, so that the newest is found until
    all are moved. The caller then writes config.yaml. The run resumes from `source`, which stays.
    """
    for left in (*folder.glob(".export.*"), folder / MEASURED):  # by killed writes
        delete(left)
    delete_partial(folder / "checkpoints")
    aside = folder / SET_ASIDE
    moved = [folder / "export"] if (folder / "export").exists() else []
    for path in checkpoint_files(folder / "checkpoints"):
        if number_of(path) > step and not (source and source.exists() and path.samefile(source)):
            moved.append(path)
    if not moved:
        return
    (aside / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (folder / name).is_file() and not (aside / name).exists():
            refuse_links(folder, [folder / name])
            with atomic_write(aside / name) as temporary:
                shutil.copy(folder / name, temporary)
    for path in moved:
        new = aside / path.relative_to(folder)
        delete(new)  # of an earlier run, which this one has gone past
        path.rename(new)
    names = ", ".join(path.stem for path in moved)
    print(f"{names} set aside in {aside}, until this run has written a new checkpoint")


@rank_zero_only
def drop_set_aside(folder: Path) -> None:
    """Remove `.set_aside`, once the run has gone on."""
    shutil.rmtree(folder / SET_ASIDE, ignore_errors=True)
