"""Outputs that do not say the gold answer, though its words stand in them, and near ones that do."""

from __future__ import annotations

from typing import Any

from vlm_pg.types import AnswerKind

READS = "What does the man do after he reads the letter?"
LONGEST = "Which line is the longest?"
MEAN = "What is the mean?"
OPENS = "Does the man open the window?"
PEOPLE = "How many people are in the kitchen?"
VOTES = "What percentage of voters chose Kim?"
SUM = "What is $a+b$?"
CAR = "What colour is the car?"
WHEN = "When does the man open the window?"
ROOM = "In which room does the woman leave the keys?"
VITAMIN = "Which vitamin is produced in the skin under sunlight?"
BOIL = "How long does the chef boil the eggs, in seconds?"
TRIP = "How long does the trip take, in minutes?"
FILM = "The film starts at 18:50 and ends at 20:20. How long does it last, in seconds?"
STUDY = "How many students take part in the study?"
ANIMAL = "What animal appears in the last scene?"
AUTHOR = "Who is the author of the book shown in the video?"
LIGHT = "Does the light turn green before the car moves?"
ALL_OPEN = "Are all of the windows open?"
BALL = "Does the boy catch the ball?"
TALLER = "Is the traffic light on the left taller than the tree?"
DOGS = "How many dogs are in the yard?"
SOFA = "What is the length of the sofa in meters?"
ROOTS = "What is the sum of the roots of $x^2-6x+5=0$?"
BRIDGE = "What is the name of the bridge that the cyclists cross?"
TEAM = "Which team scores the last goal in the video?"
CLOSES = "person closes the laptop."
OPTIONS = ("A. He picks up the phone", "B. He opens the window", "C. He sits on the sofa", "D. He leaves the room")
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    READS: OPTIONS,
    LONGEST: ("B", "A", "C"),  # "A" may be the letter or the text of B
    ROOM: ("A. Kitchen", "B. Bathroom", "C. Hallway", "D. Bedroom"),
    VITAMIN: ("A. Vitamin K", "B. Vitamin B12", "C. Vitamin A", "D. Vitamin D"),
    TEAM: ("A. The red team", "B. The blue team", "C. The white team"),
}
DETAILS: dict[str, dict[str, Any]] = {
    MEAN: {"precision": 1.0},
    VOTES: {"unit": "percent"},
    BOIL: {"unit": "seconds"},
    TRIP: {"unit": "minutes"},
    FILM: {"unit": "seconds"},
    SOFA: {"unit": "meters"},
}
# kind, question, gold answer -> outputs
NEVER_RIGHT: dict[tuple[AnswerKind, str, str], tuple[str, ...]] = {
    ("multiple_choice", READS, "B"): (
        "He opens the door.",
        "He closes the window.",
        "He tries to open the window but fails.",
        "He is about to open the window when the phone rings, so he picks it up.",
        "He wants to open the window, but he picks up the phone.",
        "He doesn't open the window.",
        "The woman opens the window.",
        "The window is opened by the woman.",
        "Someone else opens the window.",
        "He asks her to open the window.",
        "He had opened the window before he read the letter.",
        "Before reading the letter, he opens the window.",
        "After opening the window, he reads the letter.",
        "He could open the window.",
        "He refuses to open the window.",
        "He forgets to open the window.",
        "I doubt that he opens the window.",
        "It is unclear whether he opens the window.",
        "B was my first guess; it's actually C.",
        "B is what the question wants us to think, but the right one is C.",
        "Bob picks up the phone.",
        "B-roll footage shows him leaving the room.",
        "Plan B is to leave the room.",
        "The answer is anything except B.",
        "(A) no (B) no (C) yes (D) no",
        "B 30%, C 60%",
        "选项B的描述与视频不符,选C",
        "除了B都对",
        "B看起来正确,但实际上是C",
        "我原本以为是B,后来发现是D",
        "答案在A和B之间",
        "Correct option: A ✔️\nIncorrect options: B ✖️, C ✖️, D ✖️",
        "Incorrect option: B ✖️\nCorrect options: A ✔️, C ✔️, D ✔️",
        "Correct options: A, B\nIncorrect options: C, D",
        "Correct option: B ✖️\nIncorrect options: A ✔️, C ✔️, D ✔️",
        "My first instinct was B. My second instinct was A. I will stay with my second instinct.",
        "My first instinct was B. My second instinct was A. I will not stay with my first instinct.",
        "My first instinct was B. My second instinct was A. Should I stay with my first instinct?",
        "My first guess was B. My first guess was A. I will stick to my first guess.",
        "My first choice was B. I follow my second choice.",
        "Wrong options: B, C\nCorrect options: A",
        "B: 100% wrong, C: 100% right",
        "B: 0%, C: 100%",
        "A: 10%, B: 20%, C: 60%, D: 10%",
        "A: 50%, B: 50%",
        "A: 90%, B: 95%",
    ),
    ("multiple_choice", READS, "A"): (
        "A man reads a letter and leaves.",
        "视频中有A和B两个人",
        "在A处",
        "Type A personality",
        "A: no. B: no. C: yes.",
        "A. He picks up the phone is wrong.",
        "A. He picks up the phone: wrong",
        "A. He picks up the phone (incorrect)",
        "A. He picks up the phone? No.",
        "A. The first one is wrong.",
        "A. ist falsch",
        "A. 是错误的",
    ),
    ("multiple_choice", LONGEST, "B"): (
        "A",
        "(A)",
        "B",
        "Option A",
        "The answer is A.",
        "The answer is B.",
        "\\boxed{A}",
        "\\boxed{B}",
        "(B) B",
    ),
    ("numerical", MEAN, "1.2"): ("1.26", "1.3", "1.14"),
    ("yes_no", OPENS, "yes"): (
        "He tries to open the window but fails.",
        "The woman opens the window.",
        "He closes the window.",
        "He refuses to open the window.",
        "If he opens the window, it gets cold.",
        "Yes is not the answer.",
        "The answer is not yes.",
        "It is not true that the man opens the window.",
        "It's false that the man opens the window.",
        "Nobody opens the window.",
        "The man opens the window? No.",
        "The man is unable to open the window.",
        "是的,但他没有打开",
        "对,不过他没打开窗户",
        "是的，但是他不打开窗户",
    ),
    ("yes_no", OPENS, "no"): (
        "No doubt, he opens the window.",
        "No, wait, he does open it. Yes.",
        "Not only does the man open the window, he also closes it.",
        "It is not true that he does not open the window.",
    ),
    ("numerical", PEOPLE, "3"): (
        "There are 3 people in the garden.",
        "3 of the 5 people are in the garden.",
        "There are fewer than 3 people.",
        "3-4",
        "In frame 3 there are several people.",
        "3 more people than in the hall.",
        "3 times as many as in the hall",
        "3%",
        "at 3 o'clock",
        "There are 3 of them in the garden.",
        "Some wear hats. There are 3 of them.",
        "There were 3 people, but two left, so there is one.",
        "3 dogs and 2 people",
        "If 3 more came, there would be 5.",
        "There aren't 3 people in the kitchen.",
        "nearly 3",
        "There are almost 3 people.",
        "3 of 5",
        "3 out of 5 people",
        "3 of 5 people are in the hall.",
        "3 cups",
        "There are 3 cups in the kitchen.",
        "There are 3 red chairs.",
        "3 pieces of cake",
        "3 women's shoes",
        "3 man-made objects",
        "3 groups of people",
    ),
    ("numerical", VOTES, "40"): (
        "40% did not choose Kim.",
        "Kim was chosen by 40 people.",
        "More than 40%",
        "40% of the voters were women.",
        "40% chose Lee.",
        "40% of the voters chose Lee.",
        "40 % chose Ana",
        "40% opted for Lee.",
    ),
    ("mathematics", SUM, "7"): (
        "$a = 7$",
        "$a = 3$, $b = 7$",
        "$a+b \\neq 7$",
        "$a + b > 7$",
        "$a + b = 7$ or $8$",
        "$a - b = 7$",
        "$2(a+b) = 7$",
        "\\boxed{7} is wrong",
        "Let $a = 3$, $b = 7$.",
        "$a+b=7$ would imply $a<0$, a contradiction.",
        "If $a + b = 7$ then ...",
    ),
    ("exact", CAR, "red"): (
        "The car is not red.",
        "The truck is red.",
        "The car is red and white.",
        "dark red",
        "The car is either red or blue.",
        "It was red before it was painted blue.",
        "blue, not red",
        "The car next to the red one is blue.",
        "It is not blue but not red either.",
        "The car looks red but is actually orange.",
    ),
    ("time_span", WHEN, "[5.0, 10.0]"): (
        "He closes the window from 5 to 10 seconds.",
        "Not from 5 to 10 seconds.",
        "He opens the window before 5 seconds and leaves after 10 seconds.",
        "5 to 10 frames",
        "It is 5 to 10 minutes long.",
    ),
    ("multiple_choice", ROOM, "C"): (
        "She walks through the hallway, past the bathroom, and leaves the keys in the bedroom.",
        "She walks through the kitchen, past the bathroom, and sits down in the hallway.",
        "She walks through the kitchen and does not leave the keys in the hallway.",
        "She leaves the kitchen through the hallway with the keys.",
        "The keys are in the kitchen. In the bedroom she has a bag. In the hallway she puts on a coat.",
        "She is in the kitchen. She is in the bathroom. She is in the hallway.",
    ),
    ("multiple_choice", VITAMIN, "D"): (
        "不是维生素D",
        "除维生素D",
        "维生素D和维生素K",
        "维生素B12",
        "缺维生素D",
        "没有维生素D",
    ),
    ("multiple_choice", VITAMIN, "C"): ("维生素C", "维生素K", "维生素D"),
    ("multiple_choice", VITAMIN, "A"): ("维生素A", "无维生素K", "维生素K或D"),
    ("numerical", BOIL, "390"): (
        "at 6:30",
        "6:30 to 7:00",
        "The clock shows 6:30 when she starts.",
        "6:30 hours",
        "6:30 a.m.",
        "The timer is 6:30.",
        "It is 6:30.",
    ),
    ("numerical", TRIP, "1.5"): ("1:30", "It takes 1:30."),
    ("numerical", FILM, "90"): ("1:30", "It lasts 1:30.", "about 1:30"),
    ("numerical", STUDY, "120"): (
        "120 students, of whom 70 take part in the study, were asked.",
        "120 students, of whom 70 are women, do not take part in the study.",
        "120 teachers, of whom 70 are women, take part in the study.",
        "Of 300 students, 120 of whom are women, 80 take part in the study.",
        "70 students, of whom 120 are women, take part in the study.",
    ),
    ("exact", ANIMAL, "a polar bear"): (
        "In the first scene, a polar bear walks across the ice.",
        "In the last scene, a polar bear statue stands in the snow.",
        "In the last scene, a polar bear walks in and a seal dives.",
        "In the last scene, a polar bear never walks across the ice.",
        "In the last scene, a polar bear is not seen.",
        "A polar bear is seen in the first scene.",
        "A polar bear is seen in the scene before the last.",
        "In the last scene, a polar bear seems out of sight.",
        "In the last scene, a polar bear disappears and the seal comes.",
    ),
    ("exact", AUTHOR, "Jane Austen"): (
        "The book was not written by Jane Austen but by Charlotte Brontë.",
        "The book was not reviewed by Anne but by Jane Austen.",
        "The book was not written by Anne but for Jane Austen.",
        "The book was read by Jane Austen.",
        "The foreword was written by Jane Austen.",
        "The book on the shelf next to it was written by Jane Austen.",
        "It was written by Jane Austen's sister.",
        "Austen, Anne",
        "Austen, Jane and Brontë, Anne",
        "Austen, Jane's sister",
    ),
    ("yes_no", LIGHT, "yes"): (
        "The car moves before the light turns green.",
        "The light turns green after the car moves.",
        "After the car moves, the light turns green.",
        "Before the light turns green, the car moves.",
        "The light never turns green before the car moves.",
        "The light turns red before the car moves.",
    ),
    ("yes_no", LIGHT, "no"): (
        "The car moves after the light turns green.",
        "Before the car moves, the light turns green.",
        "The car does not move before the light turns green.",
        "The car moves before the light turns red.",
        "The car might move before the light turns green.",
        "It is false that the car moves before the light turns green.",
    ),
    ("yes_no", ALL_OPEN, "yes"): (
        "Two of the windows are open.",
        "Some of the windows are open.",
        "Most of the windows are open.",
        "Two of the windows are closed.",
        "One window is closed.",
        "Half of the windows are open.",
    ),
    ("yes_no", ALL_OPEN, "no"): (
        "Two of the doors are closed.",
        "None of the windows are closed.",
        "0 of the windows are closed.",
        "At most two of the windows are closed.",
        "Two of the windows are closed? No, all of them are open.",
        "Two of the windows are closed at first, then all are open.",
        "Two of the windows are open.",
    ),
    ("yes_no", BALL, "no"): (
        "The girl catches the ball.",
        "A girl catches the ball.",
        "The girl is seen with the ball.",
    ),
    ("yes_no", BALL, "yes"): (
        "The boy fails to catch the ball.",
        "He failed to catch the ball.",
        "The girl fails to catch the ball.",
    ),
    ("yes_no", TALLER, "yes"): (
        "The tree is taller than the traffic light on the left.",
        "The tree on the left is taller than the traffic light.",
        "The traffic light on the left is not taller than the tree.",
        "The traffic light on the left is taller than the house.",
    ),
    ("yes_no", TALLER, "no"): (
        "The tree is not taller than the traffic light on the left.",
        "The house is taller than the traffic light on the left.",
        "It is false that the tree is taller than the traffic light on the left.",
        "The traffic light on the left is taller than the tree.",
    ),
    ("numerical", DOGS, "4"): (
        "4 dog bowls are in the yard.",
        "There are 4 dog houses.",
        "I can see 4 large dog toys.",
    ),
    ("numerical", SOFA, "2"): (
        "The sofa seats two people comfortably.",
        "The sofa has 2 cushions.",
        "The sofa is 200 cm deep and 90 cm high.",
        "The sofa is 90 cm long and 200 cm deep.",
    ),
    ("mathematics", ROOTS, "6"): (
        "The roots are $x = 1$ and $x = 6$.",
        "The sum is not $6$.",
        "One root is $x = 6$, the other $x = 0$, not both.",
    ),
    ("exact", BRIDGE, "Charles Bridge"): (
        "The bridge in the background is the Charles Bridge in Prague, not the one that they cross.",
        "The bridge is not the Charles Bridge in Prague.",
        "The town appears to be the Charles Bridge in Prague.",
        "The bridge is the Charles Bridge Museum in Prague.",
    ),
    ("multiple_choice", TEAM, "B"): (
        "The last goal is scored by the red team against the blue team.",
        "The red team scores the last goal versus the blue team.",
        "Against the blue team the white team scores the last goal.",
    ),
    ("time_span", CLOSES, "[2.0, 5.0]"): (
        "The person opens the laptop from 2 to 5 seconds and closes it from 10 to 14 seconds.",
        "The person opens the laptop from 2 to 5 seconds and closes the door from 10 to 14 seconds.",
        "The person closes the door from 2 to 5 seconds and the laptop from 10 to 14 seconds.",
        "2-5 people",
        "There are 2 to 5 people.",
        "2 to 5 steps",
    ),
    ("time_span", CLOSES, "[10.0, 14.0]"): (
        "The person opens the door from 2 to 5 seconds and closes it from 10 to 14 seconds.",
        "The person closes the laptop from 2 to 5 seconds and opens it from 10 to 14 seconds.",
        "The person opens the laptop from 2 to 5 seconds and holds it from 10 to 14 seconds.",
    ),
}
