"""Outputs in the styles of several models, half of them plausible ones that do not say what a hasty reader reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlm_pg.eval.reading import WholeReader
from vlm_pg.rewards.settings import RewardSettings
from vlm_pg.types import AnswerKind, Sample

ONIONS = (
    "What does the woman do right after she cuts the onions?",
    ("A. She washes the knife", "B. She puts them into the pan", "C. She opens the fridge", "D. She wipes the counter"),
)
CYCLIST = (
    "Why does the cyclist stop?",
    (
        "A. The traffic light turns red",
        "B. A dog crosses the road",
        "C. His chain comes off",
        "D. He wants to take a photo",
    ),
)
METHOD = (
    "Which method does the lecturer recommend for this problem?",
    ("A. Gradient descent", "B. Newton's method", "C. Simulated annealing", "D. Random search"),
)
GOALS = ("How many goals are scored in the clip?", ("A. 1", "B. 2", "C. 3", "D. 4"))
DOOR = (
    "If I stand by the sofa and face the television, where is the door?",
    ("A. front-left", "B. front-right", "C. back-left", "D. back-right"),
)
ORDER = (
    "In which order do the objects appear first in the video?",
    (
        "A. lamp, chair, table, bed",
        "B. chair, lamp, bed, table",
        "C. table, bed, lamp, chair",
        "D. bed, table, chair, lamp",
    ),
)
WINNER = ("Who wins the race?", ("A. Anna", "B. Ben", "C. Carla", "D. David"))
MOOD = ("How does the boy feel at the end?", ("A. Happy", "B. Sad", "C. Angry", "D. Surprised"))
LAST = (
    "Which of these are shown in the documentary?",
    ("A. A glacier", "B. A volcano", "C. A desert", "D. All of the above", "E. None of the above"),
)
ROOMS = ("Which is closest to the stove?", ("A. sink", "B. fridge", "C. window", "D. dishwasher"))
SHIRTS = ("How many people wear a hat?", {}, "4")
HEIGHT = ("What is the height of the cabinet in centimeters?", {"unit": "cm"}, "180")
FAR = (
    "Measuring from the closest points, what is the distance between the sofa and the stove (in meters)?",
    {"unit": "m"},
    "2.5",
)
AREA = (
    "What is the size of this room (in square meters)? If there are several rooms, estimate the combined space.",
    {"unit": "m^2"},
    "24",
)
TIME = ("How many minutes does the cake stay in the oven?", {"unit": "minutes"}, "45")
PRICE = ("How much does the ticket cost in dollars?", {"unit": "dollars"}, "12.5")
PERCENT = ("What percentage of the energy is lost as heat?", {"unit": "percent"}, "40")
FIGURE = ("What was the value in 2015 according to the chart?", {}, "130")
BUS = "Does the bus stop at the second station?"
TWO = "Are there two dogs in the garden?"
CUP = "Is the red cup to the left of the blue cup?"
QUADRATIC = ("Solve $x^2 - 5x + 6 = 0$.", "2, 3")
THIRD = ("What is the probability that the ball is red?", "\\frac{1}{3}")
SURD = ("Simplify $\\sqrt{72}$.", "6\\sqrt{2}")
FACTOR = ("Factor $x^2 - 9$.", "(x-3)(x+3)")
TUPLE = ("Find the vertex of the parabola $y = (x-2)^2 + 5$.", "(2,5)")
DEGREES = ("Find the measure of angle $ABC$ in degrees.", "70")

# Question, output, letter that a careful human reads (none: no option, or several), why.
CHOICES: list[tuple[tuple[str, tuple[str, ...]], str, str | None, str]] = [
    (ONIONS, "B", "B", "the letter alone"),
    (ONIONS, "B.", "B", "the letter and a stop"),
    (ONIONS, "B. She puts them into the pan", "B", "letter and text"),
    (
        ONIONS,
        ("After cutting the onions, the woman picks up the board and scrapes them into the pan.\n\n**Answer: B**"),
        "B",
        "text, then the letter",
    ),
    (
        ONIONS,
        (
            "Based on the video, the woman puts the onions into the pan right after cutting them. "
            "Therefore, the correct answer is:\n\n**B. She puts them into the pan**"
        ),
        "B",
        "conclusion",
    ),
    (
        ONIONS,
        (
            "Looking at the sequence of events:\n\n1. She peels the onions.\n2. She cuts them.\n3. She "
            "puts them into the pan.\n4. She wipes the counter.\n\nRight after cutting, she puts them "
            "into the pan.\n\nThe answer is B."
        ),
        "B",
        "a numbered list is no list of options",
    ),
    (ONIONS, "视频中，女人切完洋葱后把它们放进了锅里。所以正确答案是 **B**。", "B", "Chinese"),
    (ONIONS, "根据视频，选项A和C没有出现，D发生在最后，因此选择B。", "B", "Chinese, others rejected"),
    (
        ONIONS,
        (
            "<think>\nSo the user asks what she does right after cutting. I see the knife going to the "
            "sink... could be A. But no, the pan comes first. So B.\n</think>\n\nB"
        ),
        "B",
        "thinking, then the letter",
    ),
    (
        ONIONS,
        (
            "Got it, let's look at the frames. At 00:12 she cuts. At 00:20 she opens the fridge? "
            "Hmm.\n</think>\n\nThe answer is **C. She opens the fridge**."
        ),
        "C",
        "thinking without a beginning",
    ),
    (ONIONS, "The woman puts the onions in the pan.", "B", "text with another preposition"),
    (ONIONS, "She opens the fridge.", "C", "the text"),
    (
        ONIONS,
        "She opens the fridge after she has put the onions into the pan.",
        "B",
        "the first after cutting is the pan",
    ),
    (
        ONIONS,
        "First she wipes the counter, and only then does she put them into the pan.",
        "D",
        "what comes first is what is asked",
    ),
    (ONIONS, "She either washes the knife or wipes the counter.", None, "undecided between two"),
    (ONIONS, "She washes the knife and wipes the counter.", None, "two at once"),
    (ONIONS, "The woman does not put them into the pan.", None, "only a rejection"),
    (ONIONS, "She cries because of the onions.", None, "none of the options"),
    (
        ONIONS,
        (
            "The options are:\nA. She washes the knife\nB. She puts them into the pan\nC. She opens "
            "the fridge\nD. She wipes the counter"
        ),
        None,
        "only a listing",
    ),
    (
        ONIONS,
        (
            "The options are A. She washes the knife, B. She puts them into the pan, C. She opens the "
            "fridge, D. She wipes the counter. The video is too dark to tell."
        ),
        None,
        "a listing and giving up",
    ),
    (ONIONS, "B. She washes the knife", None, "letter and text contradict"),
    (ONIONS, "The answer is A. She puts them into the pan.", None, "letter and text contradict"),
    (ONIONS, "She puts them into the pan, so the answer is C.", None, "the conclusion contradicts the text"),
    (
        ONIONS,
        "The answer is B. Actually, looking again, she opens the fridge first, so it should be C.",
        "C",
        "changes its mind",
    ),
    (ONIONS, "The answer is C. Wait, she opens the fridge before cutting. So B.", "B", "changes its mind"),
    (ONIONS, "A? No. B? No. C? Yes, she opens the fridge.", "C", "questions answered one by one"),
    (
        ONIONS,
        (
            "Option A: the knife stays on the board, so this is wrong.\nOption B: the pan is empty "
            "until later, wrong.\nOption C: correct, she goes to the fridge.\nOption D: wrong."
        ),
        "C",
        "a checklist in words",
    ),
    (
        ONIONS,
        (
            "Let's go through the options one by one.\n\nA. She washes the knife - this happens at the "
            "very end.\nB. She puts them into the pan - this happens after she opens the fridge.\nC. "
            "She opens the fridge -"
        ),
        None,
        "stops in the middle of the list",
    ),
    (ONIONS, "I would have said B, but the fridge is opened first.", "C", "a counterfactual, then the fridge"),
    (ONIONS, "It might be A, though it might just as well be D.", None, "two that may be"),
    (ONIONS, "Answer: B/C", None, "two letters"),
    (ONIONS, "Answer: B (not C)", "B", "one rejected"),
    (ONIONS, "A is the most plausible distractor, but B is what is shown.", "B", "a distractor is no answer"),
    (ONIONS, "It's tempting to say A, but the correct answer is D.", "D", "tempting is no answer"),
    (ONIONS, "Most people would answer B.", None, "what others would answer"),
    (ONIONS, "If she had put them into the pan, B would be right, but she did not.", None, "hypothetical"),
    (ONIONS, "The answer is not B.", None, "only a rejection"),
    (ONIONS, "Not B, since the pan is never used.", None, "only a rejection"),
    (ONIONS, "My previous answer, B, was wrong.", None, "withdrawn"),
    (ONIONS, "B was my first thought, but on reflection I choose A.", "A", "changes its mind"),
    (ONIONS, "I cannot determine which, but if I had to guess, I'd go with D.", "D", "a guess is an answer"),
    (ONIONS, "The video does not show what happens after the onions are cut.", None, "gives up"),
    (ONIONS, "Sorry, I can't help with identifying people in videos.", None, "a refusal"),
    (CYCLIST, "The cyclist stops because a dog crosses the road.", "B", "the text"),
    (CYCLIST, "The cyclist stops because a dog runs across the road in front of him.", "B", "the text in other words"),
    (
        CYCLIST,
        "The cyclist stops although the traffic light has not turned red; his chain came off.",
        "C",
        "one denied, one stated",
    ),
    (
        CYCLIST,
        "When the traffic light turns red, the cars stop. The cyclist stops to take a photo.",
        "D",
        "another's reason is no answer",
    ),
    (CYCLIST, "The cyclist does not stop because of the dog, but because his chain comes off.", "C", "not ... but"),
    (
        CYCLIST,
        "A dog can be seen by the road, but the cyclist stops for another reason.",
        None,
        "rejects without naming",
    ),
    (CYCLIST, "The cyclist stops at the side of the road and looks around.", None, "no reason"),
    (
        CYCLIST,
        ("A. The traffic light turns red\n\nHowever, the light is green in all frames, so A cannot be right."),
        None,
        "withdrawn",
    ),
    (
        CYCLIST,
        (
            "**Analysis:**\n- **A** – The light is green. ❌\n- **B** – A dog is seen. ✅\n- **C** – The "
            "chain is fine. ❌\n- **D** – No camera. ❌"
        ),
        "B",
        "ticks",
    ),
    (CYCLIST, "- A ✗\n- B ✓\n- C ✓\n- D ✗", None, "two ticks"),
    (CYCLIST, "| Option | Verdict |\n|---|---|\n| A | no |\n| B | no |\n| C | yes |\n| D | no |", "C", "a table"),
    (CYCLIST, "The answer is (B) A dog crosses the road.", "B", "letter in brackets and text"),
    (CYCLIST, "\\boxed{C}", "C", "a box"),
    (CYCLIST, "\\boxed{C} is wrong, the answer is \\boxed{D}.", "D", "the last box"),
    (
        CYCLIST,
        ("The final answer is \\boxed{A}. Hmm, wait. The light was green. The final answer is \\boxed{B}."),
        "B",
        "a corrected box",
    ),
    (CYCLIST, "<answer>B</answer>", "B", "tags"),
    (CYCLIST, "<answer>A or B</answer>", None, "two in tags"),
    (CYCLIST, "<think>The dog... B.</think><answer>C</answer>", "C", "thinking is not read"),
    (
        CYCLIST,
        "<answer>B</answer> The chain comes off, so C.",
        "C",
        "a conclusion behind the tag is the last statement",
    ),
    (CYCLIST, "答案：B。但仔细看，其实是链条掉了，应该选C。", "C", "changes its mind in Chinese"),
    (CYCLIST, "不是A，也不是B。", None, "only rejections in Chinese"),
    (CYCLIST, "可能是A，也可能是C。", None, "undecided in Chinese"),
    (CYCLIST, "A、B、D都不对，所以选C。", "C", "others rejected in Chinese"),
    (CYCLIST, "骑车人停下来是因为红灯亮了，因此答案是A。", "A", "Chinese"),
    (CYCLIST, "无法确定，视频中没有显示原因。", None, "gives up in Chinese"),
    (CYCLIST, "选项B错误。", None, "only a rejection in Chinese"),
    (CYCLIST, "正确选项不是B，而是D。", "D", "not B but D in Chinese"),
    (
        CYCLIST,
        "The correct answer would be B if the dog were on the road, but it is not.",
        None,
        "hypothetical, denied",
    ),
    (CYCLIST, "Although B looks right at first, the evidence supports D.", "D", "looks right at first"),
    (CYCLIST, "Options A and B can be eliminated. Between C and D, I cannot decide.", None, "undecided"),
    (CYCLIST, "Options A and B can be eliminated. Between C and D, C fits better.", "C", "decided"),
    (CYCLIST, "We can eliminate A, B and C.", None, "only rejections"),
    (CYCLIST, "We can eliminate A and B.", None, "two are left"),
    (CYCLIST, "Anything but C.", None, "three are left"),
    (CYCLIST, "It's B for sure, definitely not A.", "B", "one stated, one rejected"),
    (
        CYCLIST,
        "The question asks why the cyclist stops. Option B says a dog crosses the road.",
        None,
        "what an option says is no choice",
    ),
    (CYCLIST, "Option B says that a dog crosses the road, which is exactly what happens.", "B", "an option confirmed"),
    (CYCLIST, "Option B says that a dog crosses the road, but no dog is seen anywhere.", None, "an option denied"),
    (CYCLIST, "I am torn between A and C, leaning towards A.", "A", "leans to one"),
    (CYCLIST, "I am torn between A and C.", None, "undecided"),
    (
        CYCLIST,
        ("Answer: C\nExplanation: The chain comes off at 0:14. The light (A) is green and no dog (B) is visible."),
        "C",
        "letters in brackets of an explanation",
    ),
    (CYCLIST, "Answer: C\nExplanation: The traffic light turns red.", None, "explanation contradicts the letter"),
    (CYCLIST, "Correct answer: D. Incorrect answers: A, B, C.", "D", "correct and incorrect ones listed"),
    (CYCLIST, "Incorrect: A, B, C. Correct: D.", "D", "correct and incorrect ones listed"),
    (
        CYCLIST,
        (
            "Let me check each option:\nA. The traffic light turns red: The light is red when he "
            "stops.\nB. A dog crosses the road: There is no dog.\nC. His chain comes off: Not "
            "visible.\nD. He wants to take a photo: No camera is visible.\n\nSo the best choice is A."
        ),
        "A",
        "options discussed, then a choice",
    ),
    (METHOD, "The lecturer recommends Newton's method because it converges quadratically.", "B", "the text"),
    (METHOD, "The lecturer recommends Newton's method over gradient descent.", "B", "one over the other"),
    (METHOD, "The lecturer warns against gradient descent.", None, "a warning is no recommendation"),
    (METHOD, "Unlike gradient descent, which is too slow here, simulated annealing is recommended.", "C", "unlike"),
    (METHOD, "Instead of random search, he recommends gradient descent.", "A", "instead of"),
    (METHOD, "He recommends gradient descent instead of Newton's method.", "A", "instead of"),
    (
        METHOD,
        "Gradient descent is discussed first, then Newton's method, then simulated annealing.",
        None,
        "only discussed",
    ),
    (
        METHOD,
        "Simulated annealing is a probabilistic technique for approximating the global optimum.",
        "C",
        "the one option whose text is named",
    ),
    (METHOD, "Simulated annealing", "C", "the text alone"),
    (METHOD, "The lecturer recommends genetic algorithms.", None, "none of the options"),
    (METHOD, "Stochastic gradient descent with momentum, so A.", "A", "the letter concludes"),
    (METHOD, "The lecturer says that random search is not recommended.", None, "only a rejection"),
    (METHOD, "Neither gradient descent nor Newton's method is recommended.", None, "only rejections"),
    (
        METHOD,
        "Neither gradient descent nor Newton's method is recommended; he suggests random search.",
        "D",
        "neither, then one",
    ),
    (METHOD, "The answer is gradient descent (B).", None, "letter and text contradict"),
    (METHOD, "The answer is gradient descent (A).", "A", "letter behind the text"),
    (METHOD, '{"answer": "C. Simulated annealing"}', "C", "JSON"),
    (METHOD, '```json\n{"reasoning": "A is too slow", "answer": "B"}\n```', "B", "JSON in a fence"),
    (METHOD, '{"A": 0.1, "B": 0.6, "C": 0.2, "D": 0.1}', None, "numbers for each letter: no statement"),
    (
        METHOD,
        ("I'd rule out C and D. That leaves A and B, and the slide shows second derivatives, so B it is."),
        "B",
        "so B it is",
    ),
    (METHOD, "Could be B.", "B", "a hedge with one letter"),
    (
        METHOD,
        "A good lecturer would recommend Newton's method, but this one recommends random search.",
        "D",
        "a hypothetical one",
    ),
    (GOALS, "3", "C", "the text is a number"),
    (GOALS, "There are 2 goals in the first half and 1 in the second, so 3 in total.", "C", "the total"),
    (GOALS, "Two goals are scored.", "B", "a number word"),
    (GOALS, "The final score is 2-1.", None, "the goals are not added up"),
    (GOALS, "At least 2 goals are scored.", None, "a bound"),
    (GOALS, "More than 2.", None, "a bound"),
    (GOALS, "2 or 3", None, "undecided"),
    (GOALS, "B. 3", None, "letter and text contradict"),
    (
        GOALS,
        "Goal 1 at 0:10, goal 2 at 0:45, goal 3 at 1:20, goal 4 is disallowed.",
        None,
        "counts without a statement; one disallowed",
    ),
    (GOALS, "5 goals are scored.", None, "none of the options"),
    (GOALS, "I count 3 goals. On replay, one was offside, so only 2 count.", "B", "corrected"),
    (GOALS, "No goals are scored in the clip.", None, "zero is no option"),
    (DOOR, "The door is to your back-right.", "D", "the text"),
    (DOOR, "The door is behind you and to the right.", "D", "the text in other words"),
    (DOOR, "The door is on the left.", None, "half a direction"),
    (
        DOOR,
        "From the sofa facing the TV, the door would be at the front left. Answer: C",
        None,
        "text contradicts the letter",
    ),
    (DOOR, "front-right", "B", "the text"),
    (
        DOOR,
        ("Initially I placed it front-left, but since you face the television it is mirrored: front-right."),
        "B",
        "corrected",
    ),
    (DOOR, "The window is front-left and the door is back-left.", "C", "another thing's place"),
    (ORDER, "The order is chair, lamp, bed, table.", "B", "the text"),
    (ORDER, "chair → lamp → bed → table", "B", "arrows"),
    (ORDER, "First the bed, then the table, then the chair and finally the lamp.", "D", "in words"),
    (ORDER, "lamp, table, chair, bed", None, "no option has this order"),
    (ORDER, "The lamp appears first, so the answer is C.", "C", "a letter with a poor reason is still that letter"),
    (WINNER, "Anna wins the race ahead of Ben.", "A", "ahead of another"),
    (WINNER, "Anna leads until the last metre, but Carla overtakes her and wins.", "C", "a lead lost"),
    (WINNER, "Ben is second, David is third.", None, "no winner named"),
    (WINNER, "Ben beats David.", "B", "beats another"),
    (WINNER, "Not Ben, Carla or David.", None, "only rejections"),
    (WINNER, "It is a tie between Anna and Ben.", None, "two"),
    (WINNER, "Anna nearly wins.", None, "nearly is not"),
    (MOOD, "He seems unhappy.", None, "unhappy is not happy; sad is not said"),
    (MOOD, "The boy is not happy at all, he is angry.", "C", "one denied"),
    (MOOD, "He goes from sad to happy.", "A", "the end is asked"),
    (MOOD, "He is happy at first, then sad.", "B", "the end is asked"),
    (LAST, "All of the above", "D", "the text"),
    (LAST, "A glacier and a volcano are shown, but no desert.", None, "two of three is no option"),
    (LAST, "None of the above options matches, except A.", "A", "an exception"),
    (
        ROOMS,
        (
            "Measuring from the stove, the sink is 1.2 m away, the fridge 0.8 m, the window 2 m and "
            "the dishwasher 1.5 m away. So the fridge is closest."
        ),
        "B",
        "measured, then stated",
    ),
    (ROOMS, "The sink is closer than the window.", None, "only a comparison of two of four"),
]

# The same of outputs that were cut off.
CUT_CHOICES: list[tuple[tuple[str, tuple[str, ...]], str, str | None, str]] = [
    (CYCLIST, "Let's look at each option. A. The traffic light turns red - the light is", None, "cut off in the list"),
    (CYCLIST, "<think>The dog crosses, so B. Let me check", None, "cut off in thinking"),
]

# Question, output, number, why.
NUMBERS: list[tuple[tuple[str, dict[str, str], str], str, str | None, str]] = [
    (SHIRTS, "4", "4", "the number alone"),
    (SHIRTS, "Four people wear a hat.", "4", "a number word"),
    (
        SHIRTS,
        ("There are 4 people wearing hats in the video: two men on the left and two women behind the desk."),
        "4",
        "the parts behind the total",
    ),
    (SHIRTS, "There are 6 people, and 4 of them wear a hat.", "4", "those asked for, not all"),
    (SHIRTS, "There are 4 people in the video, of whom 3 wear a hat.", "3", "those asked for, not all"),
    (SHIRTS, "4 people are visible, but I can't tell how many wear a hat.", None, "gives up"),
    (SHIRTS, "4 people do not wear a hat.", None, "those not asked for"),
    (SHIRTS, "3 or 4 people wear a hat.", None, "undecided"),
    (SHIRTS, "Between 3 and 5 people.", None, "a range"),
    (SHIRTS, "At least 4 people wear a hat.", None, "a bound"),
    (SHIRTS, "More than 4.", None, "a bound"),
    (SHIRTS, "No more than 4 people wear a hat.", None, "a bound"),
    (SHIRTS, "Not 4 but 5 people wear a hat.", "5", "one rejected"),
    (SHIRTS, "It looks like 4, but one of them is wearing a scarf, so 3.", "3", "corrected"),
    (SHIRTS, "The answer is 4. Wait, I counted the child twice. The answer is 3.", "3", "corrected"),
    (
        SHIRTS,
        "The answer is 3. Let me recount: the man at the door also has a hat. So the answer is 4.",
        "4",
        "corrected",
    ),
    (SHIRTS, "2 men and 2 women", None, "parts without a total"),
    (SHIRTS, "2 men and 2 women wear a hat, which makes 4.", "4", "the total"),
    (SHIRTS, "One woman, two men and one child, so a total of four.", "4", "the total in words"),
    (SHIRTS, "I see a man with a hat at 0:04.", None, "a time is no count"),
    (SHIRTS, "戴帽子的有4个人。", "4", "Chinese"),
    (SHIRTS, "视频中一共有6个人，其中4人戴帽子。", "4", "Chinese, those asked for"),
    (SHIRTS, "可能是3个或4个。", None, "undecided in Chinese"),
    (SHIRTS, "不是4个，而是5个。", "5", "one rejected in Chinese"),
    (SHIRTS, "\\boxed{4}", "4", "a box"),
    (SHIRTS, "<think>1, 2, 3, 4... and the boy: 5. Hmm, he has a hood. 4.</think>\n\n4", "4", "thinking is not read"),
    (SHIRTS, "<think>I count 4 hats.</think>\n\n5", "5", "thinking is not read"),
    (SHIRTS, "<answer>4</answer>", "4", "tags"),
    (SHIRTS, "<answer>3</answer> There are 4 people with hats.", "3", "the tag counts, nothing takes it back"),
    (SHIRTS, "Everyone wears a hat.", None, "no number"),
    (SHIRTS, "Only one of the four people wears a hat.", "1", "one of four"),
    (SHIRTS, "All four people wear a hat.", "4", "all four"),
    (SHIRTS, "Nobody wears a hat.", "0", "none is zero"),
    (
        SHIRTS,
        "The 4 hats on the shelf are not worn by anyone.",
        None,
        "hats that are not worn; zero is implied at most",
    ),
    (SHIRTS, "Probably 4.", "4", "a hedge with one number"),
    (SHIRTS, "If the two in the background are counted, 4; otherwise 2.", None, "undecided between two ways to count"),
    (HEIGHT, "The cabinet is about 1.8 m tall.", "180", "converted"),
    (HEIGHT, "180cm", "180", "unit without a blank"),
    (
        HEIGHT,
        "The door is 200 cm high and the cabinet is slightly lower, about 180 cm.",
        "180",
        "another thing's height first",
    ),
    (HEIGHT, "The door next to it is 180 cm high. The cabinet is taller.", None, "another thing's height"),
    (HEIGHT, "1.8", "1.8", "a bare number has the unit asked for"),
    (HEIGHT, "170-190 cm", None, "a range"),
    (HEIGHT, "I estimate the height to be roughly 170 to 190 cm, so I'll say 180.", "180", "decided in a range"),
    (HEIGHT, "The width is 180 cm.", None, "another measure"),
    (FAR, "2.5", "2.5", "the number alone"),
    (FAR, "The sofa is 2.5 meters long.", None, "another measure"),
    (FAR, "The sofa is 2.5 meters long; the distance to the stove is about 3 meters.", "3", "another measure first"),
    (FAR, "250 cm", "2.5", "converted"),
    (FAR, "The distance is less than 2.5 meters.", None, "a bound"),
    (FAR, "沙发和炉子之间的距离大约是2.5米。", "2.5", "Chinese"),
    (AREA, "The room measures 6 m by 4 m, giving an area of 24 square meters.", "24", "the product"),
    (AREA, "The main room is 24 square meters and the hallway 6, so 30 square meters in total.", "30", "the total"),
    (AREA, "The perimeter is 24 m.", None, "another measure"),
    (TIME, "45 minutes", "45", "with its unit"),
    (TIME, "Three quarters of an hour.", "45", "a fraction of an hour"),
    (TIME, "It goes in at 10:00 and comes out at 10:45.", None, "two clock times without the difference"),
    (
        PRICE,
        "The ticket costs $15, but with the discount you pay $12.50.",
        "12.50",
        "after the discount; in doubt the last",
    ),
    (PRICE, "The ticket costs $12.50, not $15.", "12.50", "one rejected"),
    (PERCENT, "60% is used, so the remaining 40% is lost as heat.", "40", "the rest"),
    (PERCENT, "40% of the energy is converted into motion.", None, "not what is asked"),
    (FIGURE, "In 2010 the value was 130 and in 2015 it was 145.", "145", "the year asked for"),
    (FIGURE, "The value rose from 100 in 2010 to 130 in 2015.", "130", "the end of a rise"),
    (FIGURE, "The value in 2015 was about 13 higher than in 2014.", None, "a difference"),
]

# The same of outputs that were cut off.
CUT_NUMBERS: list[tuple[tuple[str, dict[str, str], str], str, str | None, str]] = [
    (SHIRTS, "I count the people with hats: 1, 2, 3, 4", None, "cut off while counting"),
]

# Question, output, side, why.
SIDES: list[tuple[str, str, str | None, str]] = [
    (BUS, "Yes.", "yes", "the word"),
    (BUS, "no", "no", "the word"),
    (BUS, "Yes, the bus stops at the second station.", "yes", "word and sentence agree"),
    (BUS, "Yes, the bus does not stop at the second station.", None, "word and sentence contradict"),
    (BUS, "No, the bus stops at the second station.", None, "word and sentence contradict"),
    (BUS, "No, the bus only stops at the first and third stations.", "no", "an explanation"),
    (BUS, "The bus drives past the second station without stopping.", "no", "denied without a not"),
    (BUS, "Based on the video, the bus does stop there. **Yes**.", "yes", "a sentence, then the word"),
    (BUS, "At first it seems so, but no.", "no", "but no"),
    (BUS, "Yes, at first glance, but in fact it drives on, so the answer is no.", "no", "changes its mind"),
    (BUS, "It is unclear whether the bus stops.", None, "gives up"),
    (BUS, "Yes or no? I can't tell.", None, "gives up"),
    (BUS, "It's possible.", None, "undecided"),
    (BUS, "If the doors open, yes.", None, "conditional"),
    (BUS, "<think>yes, it stops</think>\nNo", "no", "thinking is not read"),
    (BUS, "是的，公交车停了。", "yes", "Chinese"),
    (BUS, "没有，公交车直接开过去了。", "no", "Chinese"),
    (BUS, "\\boxed{\\text{Yes}}", "yes", "a box"),
    (
        BUS,
        "Answer: No\nReason: Yes, there is a station, but the bus keeps moving.",
        "no",
        "the reason's yes is of something else",
    ),
    (BUS, "There is no second station in the video.", "no", "what is asked is denied"),
    (TWO, "Yes, there are two dogs.", "yes", "agrees"),
    (TWO, "There are three dogs in the garden.", "no", "another number; None is as good"),
    (TWO, "Yes, there are three dogs.", None, "the word and the number contradict"),
    (TWO, "No, there is only one dog.", "no", "agrees"),
    (TWO, "I don't see two dogs in the garden.", "no", "denied"),
    (TWO, "I'm not sure, but I would say yes.", "yes", "a hedge, then the word"),
    (CUP, "The red cup is to the right of the blue cup.", "no", "the opposite"),
    (CUP, "The blue cup is to the left of the red cup.", "no", "the roles swapped"),
    (CUP, "Yes, the red cup is to the right of the blue cup.", None, "word and sentence contradict"),
    (CUP, "No. Actually yes, from the viewer's side it is on the left.", "yes", "changes its mind"),
]

# Question and gold answer, output, whether it is right, why.
MATHEMATICS: list[tuple[tuple[str, str], str, bool, str]] = [
    (QUADRATIC, "$x = 2$ or $x = 3$", True, "both roots"),
    (QUADRATIC, "The roots are $2$ and $3$.", True, "both roots in words"),
    (QUADRATIC, "\\boxed{2, 3}", True, "a box"),
    (QUADRATIC, "\\boxed{2} \\text{ and } \\boxed{3}", True, "a box for each root"),
    (QUADRATIC, "\\boxed{x=2}", False, "one root"),
    (QUADRATIC, "$(x-2)(x-3) = 0$, so $x = -2$ or $x = -3$.", False, "wrong signs"),
    (
        QUADRATIC,
        "$x=2$ or $x=3$. However, $x = 3$ does not satisfy the original condition, so $x=2$.",
        False,
        "one root withdrawn",
    ),
    (THIRD, "\\boxed{\\frac{1}{3}}", True, "a box"),
    (THIRD, "The probability is 1/3.", True, "a plain fraction"),
    (THIRD, "$P = \\frac{4}{12} = \\frac{1}{3} \\approx 0.333$", True, "simplified"),
    (
        THIRD,
        "The probability is $\\frac{2}{3}$, since $\\frac13$ of the balls are blue.",
        False,
        "the gold is of something else",
    ),
    (THIRD, "1:3", False, "odds"),
    (
        THIRD,
        "The answer is \\boxed{\\frac13}. Wait, there are 4 balls. The answer is \\boxed{\\frac14}.",
        False,
        "corrected",
    ),
    (
        THIRD,
        "The answer is \\boxed{\\frac14}. Wait, there are 3 balls. The answer is \\boxed{\\frac13}.",
        True,
        "corrected",
    ),
    (THIRD, "It is either $\\frac13$ or $\\frac12$.", False, "undecided"),
    (THIRD, "The probability is not $\\frac{1}{3}$.", False, "rejected"),
    (THIRD, "The probability is less than $\\frac{1}{3}$.", False, "a bound"),
    (THIRD, "所以概率是 $\\frac{1}{3}$。", True, "Chinese"),
    (THIRD, "<think>\\boxed{\\frac13}</think>\nThe answer is \\boxed{\\frac12}", False, "thinking is not read"),
    (THIRD, "One third.", True, "in words"),
    (SURD, "$\\sqrt{72} = \\sqrt{36 \\cdot 2} = 6\\sqrt{2}$", True, "a chain"),
    (SURD, "\\boxed{6\\sqrt{2}}", True, "a box"),
    (SURD, "$\\sqrt{72} = 3\\sqrt{8}$", True, "equal, though not simplified: the checker takes values"),
    (SURD, "$2\\sqrt{6}$", False, "another number"),
    (FACTOR, "$x^2 - 9 = (x+3)(x-3)$", True, "the factors in another order"),
    (FACTOR, "\\boxed{(x-3)^2}", False, "another polynomial"),
    (TUPLE, "The vertex is at $(2, 5)$.", True, "the point"),
    (TUPLE, "The vertex is at $(5, 2)$.", False, "swapped"),
    (DEGREES, "$\\angle ABC = 70^\\circ$", True, "with degrees"),
    (
        DEGREES,
        ("Angle $BAC$ is $70^\\circ$, so angle $ABC = 180^\\circ - 70^\\circ - 50^\\circ = 60^\\circ$."),
        False,
        "another angle",
    ),
]

# Output, span, why.
SPANS: list[tuple[str, list[float] | None, str]] = [
    ("[5.0, 10.0]", [5, 10], "brackets"),
    ("The event happens from 5.0 to 10.0 seconds.", [5, 10], "from ... to"),
    ("The given query happens in 5.0 - 10.0 seconds.", [5, 10], "a dash"),
    ("It starts at 00:05 and ends at 00:10.", [5, 10], "clock times"),
    ("5s-10s", [5, 10], "units"),
    ("从第5秒到第10秒。", [5, 10], "Chinese"),
    ("<answer>5.0 to 10.0</answer>", [5, 10], "tags"),
    ("<think>maybe 0 to 4 seconds</think>\n<answer>5.0 to 10.0</answer>", [5, 10], "thinking is not read"),
    ("<think>5.0 to 10.0</think>\n<answer>0.0 to 4.0</answer>", [0, 4], "thinking is not read"),
    ('```json\n{"start": 5.0, "end": 10.0}\n```', [5, 10], "JSON"),
    ("[[5.0, 10.0]]", [5, 10], "a list of one"),
    ("[[5.0, 10.0], [15.0, 20.0]]", None, "a list of two"),
    ("Either 5-10 s or 15-20 s.", None, "undecided"),
    ("Not from 5 to 10 s, but from 12 to 15 s.", [12, 15], "one rejected"),
    (
        (
            "The man opens the door from 5 to 10 seconds. Actually, that is another man; the right one "
            "does it from 12 to 15 seconds."
        ),
        [12, 15],
        "corrected",
    ),
    ("The event does not occur between 5 and 10 seconds.", None, "rejected"),
    (
        "The video lasts from 0 to 30 seconds. The door is opened between 5 and 10 seconds.",
        [5, 10],
        "the video's own span",
    ),
    ("The video is 10 seconds long and the event starts at 5 seconds.", None, "no end is stated"),
    ("The event starts at 5 seconds and lasts until the end.", None, "the end is not known"),
    ("It begins at 5 s and lasts 5 s.", [5, 10], "a start and a length"),
    ("It starts between 4 and 5 seconds and ends at 10 seconds.", None, "the start is a range"),
    ("The event occurs after 5 seconds and before 10 seconds.", None, "bounds; in doubt nothing"),
    (
        "Before it, from 5 to 10 seconds, the man sits. The door is opened from 12 to 15 seconds.",
        [12, 15],
        "what happens before",
    ),
    (
        "The door is opened from 5 to 10 seconds, and then the man sits from 10 to 20 seconds.",
        [5, 10],
        "what happens after",
    ),
    ("10.0 - 5.0", None, "reversed"),
    ("The event is not shown in the video.", None, "gives up"),
    ("0:05-0:10", [5, 10], "clock times and a dash"),
    ("at 5 seconds", None, "a moment"),
    ("I think it's 5 to 10 seconds, but it could also be 15 to 20 seconds.", None, "undecided"),
    ("第5秒至第10秒，不对，应该是第12秒至第15秒。", [12, 15], "corrected in Chinese"),
]

# Outputs that answer and are read as none: each costs a right answer and none gives one.
KNOWN_MISSES = {
    "She opens the fridge after she has put the onions into the pan.": "what comes after what the question names",
    "The bus drives past the second station without stopping.": "'without stopping' is not the question's words",
    "The door is behind you and to the right.": "'behind' for 'back' needs a list of synonyms",
    "The ticket costs $15, but with the discount you pay $12.50.": "two prices",
    "视频中一共有6个人，其中4人戴帽子。": "of two Chinese counts the one asked for",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[WholeReader]:
    with WholeReader(RewardSettings()) as opened:
        yield opened


def sample(
    question: str, gold: str, kind: AnswerKind, options: tuple[str, ...] = (), details: dict[str, str] | None = None
) -> Sample:
    return Sample("1", question, (), options, gold, kind, "s", "c", details=details or {})


@pytest.mark.parametrize(
    "asked,output,letter,is_cut", [(*row[:3], False) for row in CHOICES] + [(*row[:3], True) for row in CUT_CHOICES]
)
def test_choices(
    reader: WholeReader, asked: tuple[str, tuple[str, ...]], output: str, letter: str | None, is_cut: bool
) -> None:
    question, options = asked
    reading = reader.read(sample(question, letter or "B", "multiple_choice", options), output, is_cut)
    expected = None if output in KNOWN_MISSES else letter
    assert (reading.answer, reading.score) == (expected, float(expected is not None))


@pytest.mark.parametrize(
    "asked,output,number,is_cut", [(*row[:3], False) for row in NUMBERS] + [(*row[:3], True) for row in CUT_NUMBERS]
)
def test_numbers(
    reader: WholeReader, asked: tuple[str, dict[str, str], str], output: str, number: str | None, is_cut: bool
) -> None:
    question, details, gold = asked
    for right in dict.fromkeys((number or gold, gold)):
        reading = reader.read(sample(question, right, "numerical", details=details), output, is_cut)
        is_right = number is not None and output not in KNOWN_MISSES and float(number) == float(right)
        assert reading.score == float(is_right)
    assert (reading.answer is None) == (number is None or output in KNOWN_MISSES)


@pytest.mark.parametrize("question,output,side", [row[:3] for row in SIDES])
def test_yes_and_no(reader: WholeReader, question: str, output: str, side: str | None) -> None:
    expected = None if output in KNOWN_MISSES else side
    for gold in ("yes", "no"):
        reading = reader.read(sample(question, gold, "yes_no"), output, False)
        assert (reading.answer, reading.score) == (expected, float(expected == gold))


@pytest.mark.parametrize("asked,output,is_right", [row[:3] for row in MATHEMATICS])
def test_mathematics(reader: WholeReader, asked: tuple[str, str], output: str, is_right: bool) -> None:
    reading = reader.read(sample(*asked, "mathematics"), output, False)
    assert reading.score == float(is_right and output not in KNOWN_MISSES)


@pytest.mark.parametrize("output,span", [row[:2] for row in SPANS])
def test_spans(reader: WholeReader, output: str, span: list[float] | None) -> None:
    answer = reader.read(sample("When is the door opened?", "[5.0, 10.0]", "time_span"), output, False).answer
    read = None if answer is None else [float(one) for one in answer.strip("[]").split(",")]
    assert read == (None if output in KNOWN_MISSES else span)


def test_known_misses_are_outputs_of_these_tables() -> None:
    rows = [row[1] for table in (CHOICES, NUMBERS, SIDES, MATHEMATICS) for row in table]
    assert KNOWN_MISSES.keys() <= {*rows, *(row[0] for row in SPANS)}
