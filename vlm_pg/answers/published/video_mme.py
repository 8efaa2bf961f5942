"""Video-MME."""

from __future__ import annotations

from vlm_pg.answers.published.letters import first_of_four
from vlm_pg.answers.published.ranked import ranked
from vlm_pg.answers.published.rule import Rule
from vlm_pg.answers.published.tags import video_r1

RULES = (
    Rule(
        "video_mme/official",
        first_of_four,
        "the authors' rule",
        "thanku-all/parse_answer; the same in BradyFU/Video-MME, evaluation/eval_your_results.py",
        "The first capital A to D anywhere, some lead-ins removed: 'A man ...' and 'Answer: B' are A, 'Based on ... "
        "the answer is A' is B. Outputs without one leave the denominator.",
    ),
    Rule(
        "video_mme/lmms",
        ranked,
        "lmms-eval's rule",
        "EvolvingLMMs-Lab/lmms-eval, lmms_eval/tasks/_task_utils/mcq_extract.py",
        "Letters are ranked by form, the last in the text of one form: '(A) Vitamin C.' is C. Unread outputs are "
        "wrong. lmms-eval had the authors' rule before, and a more careful parser later.",
    ),
    Rule(
        "video_mme/video_r1",
        video_r1,
        "Video-R1's rule",
        "tulerfeng/Video-R1, src/eval_bench.py",
        "Whole text in the first answer tags, or whole output: '(B)' and 'B.' are wrong. The rules of VLMEvalKit and "
        "Qwen3-VL, which ask a judge where none of theirs applies, are not offered.",
    ),
)
