"""Tar files for the tests."""

import io
import tarfile


def write_tar(path, members):
    "A tar file from pairs of a member's name and its bytes; a name may come twice"
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
