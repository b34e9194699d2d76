"""What `tr11 perms check` finds wrong in a tree."""

from pathlib import Path

from tr11ops.rundir.permissions import PermissionWalk


def not_the_groups(root: Path) -> list[str]:
    """Files and folders that the group of `root` cannot use, each with what is wrong with it."""
    tally = PermissionWalk(root, root.stat().st_gid, repair=False, threads=1).run()
    return [f"{fault.path}: {', '.join(fault.what)}" for fault in tally.examples]
