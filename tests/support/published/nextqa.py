"""NExT-QA: doc-doc/NExT-QA's CSV files with the map of its videos' folders, and lmms-lab/NExTQA's Parquet, flat."""

from __future__ import annotations

from typing import Any

from tests.support.published.case import Published, media, video
from vlm_pg.types import Sample

HEADER = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4\n"
TRAIN = f"""{HEADER}\
2909445186,369,640,480,why did the boy clap,4,0,CW,to cheer,to dance,"tired, and sad",run,for fun
2909445186,369,640,480,how many people are there,0,1,DC, two ,one,five,nine,ten\x20
3238737531,100,320,240,what does he do at the end,2,0,TN,wave,sit,stand up,jump,"say ""bye"" twice"
3238737531,100,320,240,what does he do first,5,1,TP,wave,sit,stand up,jump,cry
4444444444,100,320,240,where is it,0,0,DL,park,room,beach,street,pool
"""
VAL = f"""{HEADER}\
4010069381,369,640,480,how do the two man play,1,6,CH,hit,strum,hit,blow,pat
4010069381,369,640,480,how does it end,2,7,TC,hit,strum,hit,blow,pat
4010069381,369,640,480,who is that,3,8,DO,man,woman,boy,,dog
"""
TEST = f"""{HEADER}\
3842638015,10,640,480,what is in the back,0,4,DO,tree,house,tree,car,road
3842638015,10,640,480,is it day,1,5,DB,no,yes,no,perhaps,both
"""
MAP = {"2909445186": "0101/2909445186", "3238737531": "1101/3238737531", "4010069381": "0001/4010069381"}
MAP |= {"4444444444": "0044/4444444444", "3842638015": "1010/3842638015"}
VIDEOS = [f"NExTVideo/{MAP[name]}.mp4" for name in ("2909445186", "3238737531", "4010069381", "3842638015")]


def sample(name: str, question: str, path: str, options: tuple[str, ...], answer: str, category: str) -> Sample:
    details = {"type": category, "qid": name.partition("_")[2]}
    return Sample(name, question, video(path), options, answer, "multiple_choice", "nextqa", category, details=details)


def parquet_row(number: int, qid: int, **changes: Any) -> dict[str, Any]:
    row = {"video": number, "frame_count": 369, "width": 640, "height": 480, "question": "what moves", "answer": 3}
    row |= {"qid": qid, "type": "DO", "a0": "car", "a1": "dog ", "a2": "car", "a3": "boat", "a4": "ball"}
    return row | changes


KEPT = (
    [
        sample(
            "2909445186_0",
            "why did the boy clap",
            VIDEOS[0],
            ("A. to cheer", "B. to dance", "C. tired, and sad", "D. run", "E. for fun"),
            "E",
            "CW",
        ),
        sample(
            "2909445186_1",
            "how many people are there",
            VIDEOS[0],
            ("A. two", "B. one", "C. five", "D. nine", "E. ten"),
            "A",
            "DC",
        ),
        sample(
            "3238737531_0",
            "what does he do at the end",
            VIDEOS[1],
            ("A. wave", "B. sit", "C. stand up", "D. jump", 'E. say "bye" twice'),
            "C",
            "TN",
        ),
    ],
    [
        sample(
            "4010069381_6",
            "how do the two man play",
            VIDEOS[2],
            ("A. hit", "B. strum", "C. hit", "D. blow", "E. pat"),
            "B",
            "CH",
        )
    ],
)
REFUSED = [
    ("train.csv:5", "3238737531_1", "answer_not_in_options"),
    ("train.csv:6", "4444444444_0", "missing_media"),
    ("val.csv:3", "4010069381_7", "bad_options"),
    ("val.csv:4", "4010069381_8", "missing_field"),
]
SHARD = "MC/test-00000-of-00001.parquet"
MOVES = ("A. car", "B. dog", "C. car", "D. boat", "E. ball")

CASES = {
    "CSV and map": Published(
        # By its name alone the first video might be either of two.
        {
            "train.csv": TRAIN,
            "val.csv": VAL,
            "test.csv": TEST,
            "map_vid_vidorID.json": MAP,
            **media(*VIDEOS, "cut/2909445186.mp4"),
        },
        *KEPT,
        REFUSED,
    ),
    "Parquet, flat": Published(
        {
            SHARD: [parquet_row(17, 0), parquet_row(17, 1, answer=0), parquet_row(18, 0, answer=1), parquet_row(19, 0)],
            "OE/test-00000-of-00001.parquet": [{"video": 17, "question": "what", "answer": "a car", "qid": 0}],
            **media("NExTVideo/17.mp4", "NExTVideo/18.mp4"),
        },
        (),
        [
            sample("17_0", "what moves", "NExTVideo/17.mp4", MOVES, "D", "DO"),
            sample("18_0", "what moves", "NExTVideo/18.mp4", MOVES, "B", "DO"),
        ],
        [
            ("test-00000-of-00001.parquet:2", "17_1", "bad_options"),
            ("test-00000-of-00001.parquet:4", "19_0", "missing_media"),
        ],
    ),
}
