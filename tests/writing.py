"""What the tests write and read: tar files, images as bytes, folders with captions, a pickle that acts, records."""

import io
import json
import tarfile
import tempfile

from c2lip.lab.data.sources import open_data


def write_tar(path, members):
    "A tar file from pairs of a member's name and its bytes; a name may come twice"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def encoded(image, kind="png", **how):
    "An image as a file's bytes"
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def write_captioned(folder, rows):
    "Images and captions.jsonl from rows (file name, image, what else the table says); the folder"
    for file, image, _ in rows:
        image.save(folder / file)
    lines = [json.dumps({"image": file, **more}) for file, _, more in rows]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


class Canary:
    "Opened as a pickle, it makes the file `mark`"

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def read(source, skips=None, **how):
    "The records of a data set as a list; the index is not kept"
    with tempfile.TemporaryDirectory() as folder:
        return list(open_data(source, skips=skips, index_folder=folder, **how))
