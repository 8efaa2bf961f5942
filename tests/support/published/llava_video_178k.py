"""LLaVA-Video-178K: dialogues in a folder for each subset, with "_v0_1" in most names; videos in archives there."""

from __future__ import annotations

import io
import tarfile
import zlib
from typing import Any

from tests.support.published.case import Published, media, video
from tests.support.tiny_media import mp4
from vlm_pg.types import AnswerKind, Sample

LETTER = "\nPlease respond with only the letter of the correct answer."
OPTION = "\nPlease provide your answer by stating the letter followed by the full option."
PHRASE = "\nAnswer the question using a single word or phrase."
ACADEMIC, NEXTQA, PERCEPTION = "0_30_s_academic_v0_1", "30_60_s_nextqa", "0_30_s_perceptiontest"
MC, OE = "0_30_s_academic_mc_v0_1_qa_processed", "0_30_s_academic_oe_v0_1_qa_processed"
CAP, NEXT_MC, NEXT_OE = f"{ACADEMIC}_cap_processed", f"{NEXTQA}_mc_qa_processed", f"{NEXTQA}_oe_qa_processed"
PERCEPTION_MC = f"{PERCEPTION}_mc_qa_processed"
COOKING, OTHER = (
    "academic_source/youcook2/101/zukEQgbWdsY/split_2.mp4",
    "academic_source/youcook2/207/f_2_z/split_2.mp4",
)
BOY = "NextQA/NExTVideo/1006/8968804598.mp4"
CUPS = "perception_test/video_1.mp4"
SKILLET = "What is the color of the skillet?\nA. Black\nB. Silver\nC. Red\nD. Blue"


def row(subset: str, path: str, *texts: str) -> dict[str, Any]:
    """Ids repeat: they name the video."""
    turns = [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]
    return {"id": path.split("/")[-2], "conversations": turns, "data_source": subset, "video": path}


ROWS = {
    (ACADEMIC, MC): [
        row(
            ACADEMIC,
            COOKING,
            f"<image>\nWhat is on the arm?\nA. A tattoo\nB. A watch\nC. A ring\nD. A scar{LETTER}",
            "C.",
            f"{SKILLET}{OPTION}",
            "B. Silver.",
            f"{SKILLET}{OPTION}",
            "B. Black.",
            f"{SKILLET}{LETTER}",
            "E.",
        ),
        row(
            ACADEMIC,
            OTHER,
            f"<image>\nHow many eggs?\nA. 1\nB. 2\nC. 3\nD. 4\nE. 5\nF. 6{LETTER}",
            "F.",
            f"Which one is it?{LETTER}",
            "A.",
        ),
        row(ACADEMIC, "academic_source/youcook2/gone/split_2.mp4", f"<image>\n{SKILLET}{LETTER}", "A."),
    ],
    (ACADEMIC, OE): [
        row(ACADEMIC, COOKING, "<image>\nWhat does she do?", "She stirs.", "And then?", "She tastes it."),
        row(ACADEMIC, OTHER, "<image>\nFirst?", "A pan.", "Second?"),
    ],
    (ACADEMIC, CAP): [row(ACADEMIC, COOKING, "<image>\nPlease describe the video.", "A person cooks.\n\nIt is soup.")],
    (PERCEPTION, PERCEPTION_MC): [
        row(PERCEPTION, CUPS, f"<image>\nWhere is it?\nA. left\nB. middle\nC. right{OPTION}", "C. right.")
    ],
    (NEXTQA, NEXT_MC): [
        row(NEXTQA, BOY, f"<image>\nwhy did he run\nA. fun\nB. fear\nC. to train\nD. rain\nE. late{OPTION}", "E. late.")
    ],
    (NEXTQA, NEXT_OE): [
        row(NEXTQA, BOY, f"<image>\nis he alone{PHRASE}", "No."),
        row(NEXTQA, BOY, f"<image>\nhow many dogs are there{PHRASE}", "2"),
    ],
}
FILES = {f"{subset}/{name}.json": rows for (subset, name), rows in ROWS.items()}


def sample(
    name: str, subset: str, path: str, question: str, answer: str, options: str = "", kind: AnswerKind = "free_form"
) -> Sample:
    """``options``: with a "|" between them."""
    lettered = tuple(options.split("|")) if options else ()
    return Sample(name, question, video(path), lettered, answer, "multiple_choice" if options else kind, subset, subset)


def academic(folder: str) -> list[Sample]:
    cooking, other = f"{folder}{COOKING}", f"{folder}{OTHER}"
    arm, colours = "A. A tattoo|B. A watch|C. A ring|D. A scar", "A. Black|B. Silver|C. Red|D. Blue"
    eggs = "A. 1|B. 2|C. 3|D. 4|E. 5|F. 6"
    return [
        sample(f"{MC}-1-1", ACADEMIC, cooking, "What is on the arm?", "C", arm),
        sample(f"{MC}-1-2", ACADEMIC, cooking, "What is the color of the skillet?", "B", colours),
        sample(f"{MC}-1.2-1", ACADEMIC, other, "How many eggs?", "F", eggs),
        sample(f"{OE}-1-1", ACADEMIC, cooking, "What does she do?", "She stirs."),
        sample(f"{OE}-1-2", ACADEMIC, cooking, "And then?", "She tastes it."),
        sample(f"{OE}-1.2-1", ACADEMIC, other, "First?", "A pan."),
        sample(f"{CAP}-1", ACADEMIC, cooking, "Please describe the video.", "A person cooks.\n\nIt is soup."),
    ]


REFUSED = [
    (f"{MC}.json:1", f"{MC}-1-3", "ambiguous_answer"),
    (f"{MC}.json:1", f"{MC}-1-4", "answer_not_in_options"),
    (f"{MC}.json:1, record 2", f"{MC}-1.2-2", "too_few_options"),
    (f"{MC}.json:1, record 3", f"{MC}-1.3", "missing_media"),
    (f"{OE}.json:1, record 2", f"{OE}-1.2-2", "bad_dialogue"),
]
KEPT = [
    *academic(f"{ACADEMIC}/"),
    sample(f"{PERCEPTION_MC}-1", PERCEPTION, f"{PERCEPTION}/{CUPS}", "Where is it?", "C", "A. left|B. middle|C. right"),
    sample(
        f"{NEXT_MC}-1", NEXTQA, f"{NEXTQA}/{BOY}", "why did he run", "E", "A. fun|B. fear|C. to train|D. rain|E. late"
    ),
    sample(f"{NEXT_OE}-1", NEXTQA, f"{NEXTQA}/{BOY}", "is he alone", "no", kind="yes_no"),
    sample(f"{NEXT_OE}-1.2", NEXTQA, f"{NEXTQA}/{BOY}", "how many dogs are there", "2", kind="numerical"),
]
WHERE = {COOKING: ACADEMIC, OTHER: ACADEMIC, CUPS: PERCEPTION, BOY: NEXTQA}


def archive(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        for name in names:
            entry = tarfile.TarInfo(name)
            clip = mp4(zlib.crc32(name.encode()))
            entry.size = len(clip)
            file.addfile(entry, io.BytesIO(clip))
    return content.getvalue()


ARCHIVES = {
    f"{ACADEMIC}/{ACADEMIC}_videos_1.tar.gz": archive(COOKING),
    f"{ACADEMIC}/{ACADEMIC}_videos_2.tar.gz": archive(OTHER),
    f"{NEXTQA}/{NEXTQA}_videos_1.tar.gz": archive(BOY),
    f"{PERCEPTION}/{PERCEPTION}_videos_1.tar.gz": archive(CUPS),
}
# As an older version of ``datasets`` writes tables: a list of objects is an object of lists.
COLUMNS = [
    {**one, "conversations": {name: [turn[name] for turn in one["conversations"]] for name in ("from", "value")}}
    for one in ROWS[ACADEMIC, OE]
]
OPEN = "open_ended"
YOUTUBE = "1_2_m_youtube_v0_1"
YOUTUBE_MC = "1_2_m_youtube_mc_v0_1_qa_processed"
ALSO, ONLY = "liwei/ytb_1.mp4", "liwei/ytb_2.mp4"
SAME_PATHS = {
    f"{ACADEMIC}/{MC}.json": [row(ACADEMIC, ALSO, f"<image>\n{SKILLET}{LETTER}", "A.")],
    f"{YOUTUBE}/{YOUTUBE_MC}.json": [
        row(YOUTUBE, name, f"<image>\n{SKILLET}{LETTER}", "B.") for name in (ALSO, ONLY, "liwei/ytb_3.mp4")
    ],
    **media(f"{ACADEMIC}/{ALSO}", f"{YOUTUBE}/{ALSO}", f"{ACADEMIC}/{ONLY}", "liwei/ytb_3.mp4"),
}
COLOURS = "A. Black|B. Silver|C. Red|D. Blue"
ASKED = "What is the color of the skillet?"
NOT_THERE = [
    (f"{YOUTUBE_MC}.json:1, record {number}", f"{YOUTUBE_MC}-1.{number}", "missing_media") for number in (2, 3)
]

CASES = {
    "all subsets": Published(
        {**FILES, **media(*(f"{subset}/{path}" for path, subset in WHERE.items()))},
        KEPT,
        refused=REFUSED,
        arguments=("{}", "--eval-share", "0"),
    ),
    "all subsets, videos in their archives": Published(
        {**FILES, **ARCHIVES}, KEPT, refused=REFUSED, arguments=("{}", "--unpack", "--eval-share", "0")
    ),
    "two subsets with videos of the same path": Published(
        SAME_PATHS,
        [
            sample(f"{MC}-1", ACADEMIC, f"{ACADEMIC}/{ALSO}", ASKED, "A", COLOURS),
            sample(f"{YOUTUBE_MC}-1", YOUTUBE, f"{YOUTUBE}/{ALSO}", ASKED, "B", COLOURS),
        ],
        refused=NOT_THERE,
        arguments=("{}", "--eval-share", "0"),
    ),
    "a subset asked about the videos of another": Published(
        SAME_PATHS,
        [sample(f"{MC}-1", ACADEMIC, ALSO, ASKED, "A", COLOURS)],
        refused=[
            (f"{YOUTUBE_MC}.json:1{where}", f"{YOUTUBE_MC}-1{name}", "missing_media")
            for where, name in (("", ""), (", record 2", ".2"), (", record 3", ".3"))
        ],
        arguments=(
            "--train",
            f"{{}}/{ACADEMIC}/{MC}.json",
            f"{{}}/{YOUTUBE}/{YOUTUBE_MC}.json",
            *("--media-root", f"{{}}/{ACADEMIC}", "--eval-share", "0"),
        ),
    ),
    "one subset, as a table": Published(
        {f"{OPEN}.parquet": COLUMNS, **media(f"{ACADEMIC}/{COOKING}", f"{ACADEMIC}/{OTHER}")},
        [
            sample(f"{OPEN}-1-1", ACADEMIC, f"{ACADEMIC}/{COOKING}", "What does she do?", "She stirs."),
            sample(f"{OPEN}-1-2", ACADEMIC, f"{ACADEMIC}/{COOKING}", "And then?", "She tastes it."),
            sample(f"{OPEN}-2-1", ACADEMIC, f"{ACADEMIC}/{OTHER}", "First?", "A pan."),
        ],
        refused=[(f"{OPEN}.parquet:2", f"{OPEN}-2-2", "bad_dialogue")],
        arguments=("--train", f"{{}}/{OPEN}.parquet", "--media-root", "{}", "--eval-share", "0"),
    ),
}
