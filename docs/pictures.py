"""README's moving picture and the preview of a link to it, both of the page itself, by Chromium.

python docs/pictures.py PAGE     PAGE: what docs/page.py wrote; writes nbs/images/page.gif and nbs/images/preview.png
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "nbs" / "images"
SCENE = 19  # two mugs and two boats, each in red and in green: every word is true of two things
SECONDS, BYTES = 8, 1.5e6  # at most

# the stage beside two maps, and nothing else
CLOSE = """
h1, h2, .lead, .steps, #tools, #arrange > :last-child, #questions, #help, #chips, details, #status, #search,
main > section:last-child, .c2lip-lines, .c2lip-phrase, #maps figure:first-child { display: none !important; }
main { display: grid; grid-template-columns: 248px 1fr; gap: 0 20px; padding: 14px; max-width: none; }
#arrange { display: block; } .c2lip-panels { flex-wrap: nowrap !important; } main .row { margin: 0 0 10px; }
#phrase { font-size: 19px; } body { background: #fff; }
"""

SAY = """() => document.getElementById('phrase').after(
    Object.assign(document.createElement('b'), {id: 'said', style: 'flex: 0 0 160px'}))"""


def shot(page, **how) -> Image.Image:
    "What the page shows"
    return Image.open(io.BytesIO(page.screenshot(**how))).convert("RGB")


def play(page) -> list[tuple[Image.Image, int]]:  # frames and their milliseconds
    "The green mug, then the red one is typed, then the two exchange their colours"
    page.set_viewport_size(dict(width=900, height=312))
    page.add_style_tag(content=CLOSE)
    page.evaluate(f"document.querySelector('#scenes button:nth-child({SCENE})').click()")
    page.wait_for_timeout(2000)
    page.evaluate(SAY)
    page.click("#handles button[aria-label^='a red mug']")
    page.fill("#phrase", "a green mug")
    page.wait_for_timeout(1500)
    frames = [(shot(page), 2000)]

    page.fill("#phrase", "")
    for letter in "a red mug":
        page.type("#phrase", letter)
        page.wait_for_timeout(200)  # the maps of the other phrase fade
        frames.append((shot(page), 80))
    page.wait_for_timeout(1500)
    frames.append((shot(page), 2000))
    page.evaluate("document.getElementById('exchange').click()")
    page.evaluate("document.getElementById('said').textContent = 'colours exchanged'")
    page.wait_for_timeout(2000)
    return [*frames, (shot(page), 2000)]


def write_gif(frames: list[tuple[Image.Image, int]], file: Path):
    "Frames as a GIF; an error where it is too long or too large"
    images, times = zip(*frames)
    first, *others = [image.quantize(256, kmeans=2) for image in images]
    first.save(file, save_all=True, append_images=others, duration=list(times), loop=0, optimize=True)
    seconds, size = sum(times) / 1000, file.stat().st_size
    if seconds > SECONDS or size > BYTES:
        raise SystemExit(f"{file}: {seconds:.1f} s and {size:,} bytes; at most {SECONDS} s and {BYTES:,.0f}")
    print(f"{file.name}: {seconds:.1f} s, {size:,} bytes")


def main(address: str):
    "Write both pictures"
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as play_in:
        browser = play_in.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=dict(width=1280, height=640))
        page.set_default_timeout(120_000)
        page.goto(f"file://{Path(address).resolve()}?theme=light")
        page.wait_for_function("c2lip.ready > 0")
        page.wait_for_timeout(1000)
        shot(page).quantize(200).save(IMAGES / "preview.png", optimize=True)
        write_gif(play(page), IMAGES / "page.gif")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
