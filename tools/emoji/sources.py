"""Where the training data comes from: names, keywords and the font, all from installed packages."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
DEFAULT_ANNOTATIONS = Path("/usr/share/unicode/cldr/common/annotations/en.xml")
SELECTION = Path(__file__).with_name("selection.txt")

VARIATION_SELECTOR = "\ufe0f"
SKIN_TONES = range(0x1F3FB, 0x1F400)
REGIONAL_INDICATORS = range(0x1F1E6, 0x1F200)


class MissingDataError(RuntimeError):
    """A file that a Debian package provides is not installed; the message names the package."""


@dataclass(frozen=True)
class Emoji:
    """One emoji of the data set."""

    character: str
    name: str
    keywords: tuple[str, ...]

    @property
    def label(self) -> dict[str, str]:
        """The entry of this emoji in `labels.json`."""
        return {"emoji": self.character, "name": self.name}


def require_file(path: Path, package: str) -> Path:
    """Return `path`, or say which Debian package installs it."""
    if not path.is_file():
        raise MissingDataError(f"{path} is missing; install it with: apt-get install {package}")
    return path


def is_flag_or_skin_tone(character: str) -> bool:
    """Tell whether the emoji is a flag of a country or a variant with a skin tone."""
    return any(ord(point) in SKIN_TONES or ord(point) in REGIONAL_INDICATORS for point in character)


def read_selection(path: Path = SELECTION) -> list[str]:
    """Read the emoji to learn, separated by white space; lines that start with `#` are headings."""
    lines = path.read_text(encoding="utf-8").splitlines()
    characters = [character for line in lines if not line.startswith("#") for character in line.split()]
    if len(set(characters)) != len(characters):
        raise ValueError(f"{path} lists an emoji twice")
    return characters


def read_keywords(path: Path = DEFAULT_ANNOTATIONS) -> dict[str, tuple[str, ...]]:
    """Read the English keywords of CLDR, by character without its variation selector."""
    require_file(path, "unicode-cldr-core")
    keywords = {}
    for annotation in ElementTree.parse(path).getroot().iter("annotation"):
        if annotation.get("type") is None and annotation.text:
            words = dict.fromkeys(word.strip().lower() for word in annotation.text.split("|"))
            keywords[annotation.get("cp", "")] = tuple(word for word in words if word)
    return keywords


def english_name(character: str) -> str:
    """Return the name in PyPI's `emoji`, in lower case and with spaces, such as `red apple`."""
    import emoji

    return emoji.EMOJI_DATA[character]["en"].strip(":").replace("_", " ").lower()


def load_emoji(annotations: Path = DEFAULT_ANNOTATIONS, limit: int | None = None) -> list[Emoji]:
    """Load the selected emoji in the order of their names; `limit` keeps that many, spread evenly."""
    keywords = read_keywords(annotations)
    entries = []
    for character in read_selection():
        name = english_name(character)
        words = keywords.get(character.replace(VARIATION_SELECTOR, ""), ())
        entries.append(Emoji(character, name, tuple(word for word in words if word != name)))
    entries.sort(key=lambda entry: entry.name)
    if limit is not None and limit < len(entries):
        entries = [entries[index] for index in spread(len(entries), limit)]
    return entries


def spread(total: int, count: int) -> list[int]:
    """Return `count` indices spread evenly over `range(total)`, fewer when there are not as many."""
    count = min(total, count)
    return [index * total // count for index in range(count)]


def write_labels(path: Path, entries: list[Emoji]) -> None:
    """Write the list of what the model has learned, one entry a line."""
    rows = ",\n".join(json.dumps(entry.label, ensure_ascii=False) for entry in entries)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


def read_labels(path: Path, annotations: Path = DEFAULT_ANNOTATIONS) -> list[Emoji]:
    """Read `labels.json` and join the keywords of CLDR to it."""
    keywords = read_keywords(annotations)
    entries = []
    for label in json.loads(path.read_text(encoding="utf-8")):
        words = keywords.get(label["emoji"].replace(VARIATION_SELECTOR, ""), ())
        entries.append(Emoji(label["emoji"], label["name"], tuple(word for word in words if word != label["name"])))
    return entries
