"""A conversation to run engines on: a pasted article, then questions that build on each other.

It grows as real ones do: each turn resends all that was said before. With SmolLM2's tokenizer and
32 generated tokens per turn its prompts grow from 570 tokens to 1,030.
"""

from __future__ import annotations

SYSTEM = "You are a friendly tutor. Answer in one short sentence."

ARTICLE = """\
The Town That Lives by Its Bees

Lindow is a small town between two hills, and for more than three hundred years its people have \
kept honey bees. There are about nine hundred hives in the valley, one for every two people who \
live there. Most of them stand in the old orchards by the river, painted blue, yellow and white, \
because the beekeepers believe that a bee finds its way home more easily when its own door has a \
colour that the neighbours' doors do not have.

A hive in summer is a city of fifty thousand. Nearly all of them are workers, and a worker changes \
her trade as she grows older. In her first days she cleans the cells. Then she becomes a nurse and \
feeds the young. After two weeks she builds with wax, and later she stands guard at the door. Only \
in the last three weeks of her life does she fly out to gather nectar. In all her flights together \
she brings home enough for a twelfth of a teaspoon of honey.

When a worker has found a good meadow, she tells the others by dancing. She walks in the shape of \
an eight on the comb, and the angle of her dance shows the direction of the flowers, measured from \
the sun. The longer she waggles in the middle of the eight, the farther they must fly. The \
children of Lindow learn the dance at school, and at the summer fair they perform it in striped \
shirts while the visitors try to guess where the hidden basket of cakes is.

Winter is the hard season. The bees do not sleep. They gather in a ball around their queen and \
shiver with their flight muscles to keep her warm, and they take turns, so that nobody stays at \
the cold outer edge for too long. A hive needs some fifteen kilograms of honey to reach the \
spring, and a good beekeeper never takes so much that the bees go hungry. "We are not farmers," \
says Marta Hale, who has kept bees for fifty years. "We are tenants, and the rent is kindness."

Eight years ago a disease came to the valley, and half of the hives were lost. The town answered \
by planting flowers wherever there was bare ground: clover around the church, lavender along the \
railway, and wild thyme on the roof of the bus station. Today there are more hives than before, \
and the honey tastes, as everybody in Lindow will tell you, faintly of thyme. On the first Sunday \
of August every child gets a spoonful of it for nothing, straight from the comb.
"""

SHORT_ARTICLE = ARTICLE[: ARTICLE.index("A hive in summer")]
"""For tokenizers that need a token per byte."""

LETTER = """\
Dear editor, I came to Lindow last summer to see the bees, and I went home with three jars of \
honey and one sting. The honey is gone and so is the sting, but I still think of the children who \
danced at the fair. I live in a city and have no garden, only a balcony with room for two pots. \
What could I plant there that bees would like? Yours, Peter Moss
"""

FOLLOW_UPS = (
    "How do bees tell each other where the flowers are?",
    "How do the bees keep their queen warm in winter?",
    f"A reader has written us a letter.\n\n{LETTER}\nWhat does Peter Moss want to know?",
    "What flowers did the town plant after the disease?",
    "Why is honey good for people?",
    "How many bees live in a hive in summer, and what does a worker do when she is young?",
    "Thank you! Please write one sentence that I can put under a photo of the town.",
)


def user_turns(article: str) -> tuple[str, ...]:
    """What the user says, turn by turn. The first turn carries `article`."""
    opening = f"Here is an article that I like. Please read it.\n\n{article}\n"
    return (f"{opening}What is the article about?", *FOLLOW_UPS)


USER_TURNS = user_turns(ARTICLE)
